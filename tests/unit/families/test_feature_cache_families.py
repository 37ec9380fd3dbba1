# SPDX-License-Identifier: Apache-2.0
"""Every model type finds images again that it encoded before, or says by name that it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tokenprune
from families import FAMILIES
from tokenprune import UnsupportedSetupError

ELSEWHERE = {"blip-2", "instructblip", "instructblipvideo"}  # their language model is handed embeddings


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_an_image_that_was_encoded_before_gives_the_same_bits(name: str, build: Callable) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=(1, 1))
    if family.kind in ELSEWHERE:
        with pytest.raises(UnsupportedSetupError, match="feature_cache"):
            tokenprune.patch(model, "divprune", keep=0.5, feature_cache=2**24)
        return
    with tokenprune.patched(model, "divprune", keep=0.5):
        want = model(**inputs).logits
    with tokenprune.patched(model, "divprune", keep=0.5, feature_cache=2**24):
        assert all(torch.equal(model(**inputs).logits, want) for _ in range(2))
        found = tokenprune.feature_cache(model).counts()
        assert found.hits == found.misses == found.entries > 0 == found.not_kept
