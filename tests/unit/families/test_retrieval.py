# SPDX-License-Identifier: Apache-2.0
"""Models that return a vector for each token: those of dropped ones must not pass for vectors of a page."""

from __future__ import annotations

import pytest
from torch import nn

import tokenprune
from families import FAMILIES
from families.retrieval import RETRIEVERS
from tokenprune import UnsupportedModelError


@pytest.mark.parametrize("name", RETRIEVERS)
def test_what_is_inside_is_no_way_around_a_refusal(name: str) -> None:
    """`vlm` alone looks like any other model, and what its holder makes of zeros is a vector like any other."""
    model = RETRIEVERS[name].build()
    kind = model.config.model_type
    for asked in (model, model.vlm):
        with pytest.raises(UnsupportedModelError, match=f"'{kind}' is not supported: it returns a vector"):
            tokenprune.patch(asked, "divprune", keep=0.5)
        assert not tokenprune.is_patched(model)


def test_models_of_colpali_engine_are_refused_by_name(build) -> None:
    """They are subclasses of the models that they are made of, and have their config."""
    model = build(FAMILIES["qwen2_vl"])
    for asked in (model, model.model):
        asked.custom_text_proj = nn.Linear(1, 1)
        with pytest.raises(UnsupportedModelError, match=f"{type(asked).__name__} makes a vector.*colqwen2-v1.0-hf"):
            tokenprune.patch(asked, "divprune", keep=0.5)
        del asked.custom_text_proj
    with tokenprune.patched(model, "divprune", keep=0.5):
        assert tokenprune.is_patched(model)
