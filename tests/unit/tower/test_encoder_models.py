# SPDX-License-Identifier: Apache-2.0
"""The state of models that merge in the tower, and unsupported setups."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import tokenprune
from basics import snapshot
from families.plain import FAMILIES as OTHERS
from merging_models import SUPPORTED, UNITS, image_arguments
from module_calls import record_inputs
from tokenprune import Budget, BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from zoo import FAMILIES, Family

PACKED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]  # test_packed_encoder.py


@pytest.fixture(params=SUPPORTED + UNITS)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


# -- the model afterwards ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_threads_do_not_mix(build) -> None:
    family = FAMILIES["llava_next"]
    model = build(family)
    batches = [image_arguments(family.make_inputs(seed=seed, images=(1 + seed % 2, 1))) for seed in range(4)]
    with tokenprune.patched(model, "tome", keep=0.5):
        want = [model.model.get_image_features(**batch) for batch in batches]
        got: list[Any] = [None] * 4

        def work(index: int) -> None:
            with torch.no_grad():
                for _ in range(10):
                    got[index] = model.model.get_image_features(**batches[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for actual, expected in zip(got, want, strict=True):
        assert all(map(torch.equal, actual.pooler_output, expected.pooler_output))
        assert all(map(torch.equal, get_record(actual).groups, get_record(expected).groups))


# -- unsupported setups ------------------------------------------------------------------------------------------------


def test_other_families_raise_with_reason() -> None:
    model = OTHERS["vipllava"].build()
    before = snapshot(model)
    with pytest.raises(UnsupportedSetupError, match="tome cannot act in the tower of 'vipllava', where the"):
        tokenprune.patch(model, "tome", keep=0.5)
    assert snapshot(model) == before and not tokenprune.is_patched(model)


REFUSED = {
    "share too small": (dict(keep=0.1), BudgetError, "at most half"),
    "another budget": (dict(keep=Budget.from_kv_share(0.5)), BudgetError, "a share or a number of patches"),
    "a shared budget": (dict(keep=Budget(keep=0.5, per="prompt")), BudgetError, "a share or a number of patches"),
    "contradiction": (dict(keep=1.0, r=4), OptionError, "Pass only one"),
    "too long": (dict(r=[1] * 4), OptionError, "the tower has 3 blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_setups_raise_before_changes(case: str, build) -> None:
    options, error, words = REFUSED[case]
    model = build(FAMILIES["llava"])
    before = snapshot(model)
    with pytest.raises(error, match=words):
        tokenprune.patch(model, "tome", **options)
    assert snapshot(model) == before


def test_attention_without_bias_raises(build) -> None:
    model = copy.deepcopy(build(FAMILIES["llava"]))
    model.set_attn_implementation({"vision_config": "flex_attention"})
    with pytest.raises(UnsupportedSetupError, match="proportional=False"):
        tokenprune.patch(model, "tome", keep=0.5)


def test_towers_read_at_several_layers_raise(build) -> None:
    model = copy.deepcopy(build(FAMILIES["llava"]))
    model.config.vision_feature_layer = [-2, -1]
    with pytest.raises(UnsupportedSetupError, match="several tower layers"):
        tokenprune.patch(model, "tome", keep=0.5)


@torch.no_grad()
def test_unsupported_calls_raise(build) -> None:
    llava, onevision = FAMILIES["llava"], FAMILIES["llava_onevision"]
    model, inputs = build(llava), llava.make_inputs()
    with tokenprune.patched(model, "tome", keep=0.5):
        with pytest.raises(UnsupportedSetupError, match="vision_feature_layer=-2 of the config, not for -1"):
            model(**inputs, vision_feature_layer=-1)
        text = {name: value for name, value in inputs.items() if name != "pixel_values"}
        model(**text | {"input_ids": text["input_ids"].clamp(min=16)})
    model = build(onevision)
    with tokenprune.patched(model, "tome", keep=0.5):
        with (
            record_inputs(model.model.vision_tower) as towers,
            pytest.raises(UnsupportedSetupError, match="video features"),
        ):
            model(**onevision.make_inputs(images=(0,), video=True))
        assert not towers, "the tower ran before the refusal"
        with pytest.raises(UnsupportedSetupError, match="interpolates"):
            # Features of one tile for two tiles.
            arguments = image_arguments(onevision.make_inputs(rows=1))
            model.model.get_image_features(**arguments, vision_aspect_ratio="anyres_max_1")


@torch.no_grad()
def test_later_method_without_surplus_drops_no_tokens(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    with tokenprune.patched(model, ["tome", "fastv"], keep=[0.5, 20], record=True):
        model(**inputs)
        assert [cut.method for cut in tokenprune.stats(model).cuts] == ["tome"]
