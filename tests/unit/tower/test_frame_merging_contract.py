# SPDX-License-Identifier: Apache-2.0
"""Merging frames inside a tower: outputs that a patch does not change, and unsupported setups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from tests.unit.tower.test_frame_merging import NAMES, SET, make_clips
from tokenprune import Budget, BudgetError, OptionError, TokenPruneError
from tokenprune.errors import UnsupportedSetupError
from tokenprune.selection import FrameMerger, FrameMix
from zoo import Family


@pytest.fixture(params=NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@torch.no_grad()
def test_encoded_videos_hit_the_cache(family: Family, build) -> None:
    model, inputs = build(family), make_clips(family, [True, True])
    with tokenprune.patched(model, "earlytom", keep=0.5, **SET):
        want = model(**inputs).logits
    tokenprune.patch(model, "earlytom", keep=0.5, feature_cache=2**26, **SET)
    for hits in range(2):
        assert torch.equal(model(**inputs).logits, want)
        assert tokenprune.stats(model).feature_cache.hits == hits
    tokenprune.unpatch(model)


@torch.no_grad()
def test_hidden_states_have_all_frames(family: Family, build) -> None:
    model, inputs = build(family), make_clips(family, [True, True])
    with tokenprune.patched(model, "earlytom", keep=0.5, **SET):
        output = model.model.get_video_features(inputs["pixel_values_videos"])
    states = [x for x in output.hidden_states if x is not None]  # transformers 5.24 keeps only the used states
    assert {len(x) for x in states} == {len(output.last_hidden_state)} == {18}


# -- unsupported setups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [("llava", "which 'llava' does not support"), ("qwen2_5_vl", "must be a row of a CLIP or SigLIP tower"),
     ("video_llava", "must be a row of a CLIP or SigLIP tower")],
)  # fmt: skip
def test_models_without_frame_rows_raise(name: str, message: str) -> None:
    with pytest.raises(UnsupportedSetupError, match=f"earlytom.*{message}"):
        tokenprune.patch(FAMILIES[name].build(), "earlytom", keep=0.5)


@torch.no_grad()
def test_unsupported_setups_raise(build) -> None:
    family = FAMILIES["llava_onevision"]
    model, inputs = build(family), make_clips(family, [True, True])
    for method, message in (
        (["earlytom", "tome"], "both act at"),
        (["earlytom", "vscan"], "vscan reads the attention.*earlytom merges patches"),
        (["earlytom", "evs"], "earlytom drops some of the tokens"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            tokenprune.patch(model, method, keep=0.5)
    with pytest.raises(OptionError, match="reads 3 blocks"):
        tokenprune.patch(model, "earlytom", keep=0.5, layers=(7,))
    for budget in (Budget(keep=0.5, per="prompt"), Budget.from_flops_share(0.5), Budget.per_second(4)):
        with pytest.raises(BudgetError, match="earlytom"):
            tokenprune.patch(model, "earlytom", keep=budget)
    with (
        tokenprune.patched(model, "earlytom", keep=0.5),
        pytest.raises(UnsupportedSetupError, match="vision_feature_layer=-1 of the config, not for -2"),
    ):
        model.model.get_video_features(inputs["pixel_values_videos"], vision_feature_layer=-2)


@torch.no_grad()
def test_invalid_results_of_a_method_raise(build) -> None:
    class Wrong(FrameMerger):
        name = "wrong"

        def blocks(self, depth: int) -> list[int]:
            return [0]

        def mix(self, hidden: Tensor) -> FrameMix:
            return FrameMix.from_frames([(0, 0, 1.0)])

        def groups(self, hidden: Tensor) -> list[int]:
            return [1]

        def choose_tokens(self, received: Tensor, groups: Any, keep: int) -> Tensor:
            return received

    family = FAMILIES["llava_onevision"]
    model, inputs = build(family), make_clips(family, [True, True])
    with tokenprune.patched(model, Wrong(), keep=0.5), pytest.raises(TokenPruneError, match="must return a bool"):
        model(**inputs)
