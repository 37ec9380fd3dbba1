# SPDX-License-Identifier: Apache-2.0
"""Assisted generation and feature caches for every model type: equal answers, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import tokenprune
from families import FAMILIES, STATEFUL
from tokenprune import UnsupportedModelError, UnsupportedSetupError
from zoo import Family

# These models override `generate`. States of LFM2's layers can be cropped.
OWN_GENERATE = {"blip-2", "instructblip", "instructblipvideo", "janus"}
REFUSED = {name for name, family in FAMILIES.items() if family.kind in OWN_GENERATE} | STATEFUL - {"lfm2_vl", "lfm3_vl"}
WORDS, DRAFTED = 7, 3


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    yield FAMILIES[request.param]


@torch.no_grad()
def test_the_answer_is_the_models_own(family: Family, model) -> None:
    if family.name in REFUSED:
        with pytest.raises(UnsupportedModelError, match=f"'{family.kind}'"):
            tokenprune.assistant(model, "divprune", keep=0.3)
        return
    inputs = family.make_inputs(images=(2,))
    want = model.generate(**inputs, max_new_tokens=WORDS)
    assistant = tokenprune.assistant(model, "divprune", keep=0.3)
    try:
        for parameter, target_parameter in zip(assistant.parameters(), model.parameters(), strict=True):
            assert parameter is target_parameter
        assistant.generation_config.num_assistant_tokens = DRAFTED
        assistant.generation_config.assistant_confidence_threshold = 0.0
        got = model.generate(**inputs, max_new_tokens=WORDS, assistant_model=assistant)
        stats = tokenprune.stats(assistant)
    finally:
        tokenprune.unpatch(assistant)
    assert torch.equal(got, want)
    assert stats.visual_tokens_in == sum(map(sum, inputs.counts))  # the draft receives the images
    assert stats.visual_tokens_out <= 0.4 * stats.visual_tokens_in


ELSEWHERE = {"blip-2", "instructblip", "instructblipvideo"}  # their language model gets embeddings


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
        cache_counts = tokenprune.feature_cache(model).counts()
        assert cache_counts.hits == cache_counts.misses == cache_counts.entries > 0 == cache_counts.not_kept
