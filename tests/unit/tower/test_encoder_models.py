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
from merging_models import SUPPORTED, UNITS, blocks_of, image_arguments, tower_of
from tokenprune import Budget, BudgetError, OptionError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from zoo import FAMILIES, Family

PACKED = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]  # test_packed_encoder.py


@pytest.fixture(params=SUPPORTED + UNITS)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


# -- the model afterwards ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_unpatch_restores_the_model(family: Family, model) -> None:
    inputs = family.make_inputs()
    before, was = model(**inputs).logits, snapshot(model)
    tokenprune.patch(model, "tome", keep=0.5)
    assert snapshot(model) != was
    assert not torch.equal(model(**inputs).logits, before)
    model.generate(**inputs, max_new_tokens=2)
    tokenprune.unpatch(model)
    assert snapshot(model) == was
    assert torch.equal(model(**inputs).logits, before)


@torch.no_grad()
def test_failing_forward_leaves_no_state(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    with tokenprune.patched(model, "tome", keep=0.5):
        want = model(**inputs).logits
        handle = blocks_of(tower_of(model))[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        assert torch.equal(model(**inputs).logits, want)


@torch.no_grad()
def test_deep_copy_merges_independently(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    with tokenprune.patched(model, "tome", keep=0.5):
        want = model(**inputs).logits
        twin = copy.deepcopy(model)
    assert tokenprune.is_patched(twin)
    assert torch.equal(twin(**inputs).logits, want)
    assert tokenprune.stats(twin).visual_tokens_out == 36
    tokenprune.unpatch(twin)
    assert torch.equal(twin(**inputs).logits, model(**inputs).logits)


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
    for one, other in zip(got, want, strict=True):
        assert all(map(torch.equal, one.pooler_output, other.pooler_output))
        assert all(map(torch.equal, get_record(one).groups, get_record(other).groups))


def test_gradients_flow_through_merged_tokens(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs()
    with tokenprune.patched(model, "tome", keep=0.5):
        model(**inputs).logits[:, -1].logsumexp(-1).sum().backward()
    for name, parameter in tower_of(model).named_parameters():
        if ".layers.0." in name or ".layers.1." in name:
            # A bias of the keys does not change the softmax.
            assert "k_proj.bias" in name or parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_bfloat16(family: Family) -> None:
    model = family.build().bfloat16()
    inputs = family.make_inputs()
    inputs["pixel_values"] = inputs["pixel_values"].bfloat16()
    with tokenprune.patched(model, "tome", keep=0.5):
        assert model(**inputs).logits.isfinite().all()
        assert 0.45 < tokenprune.stats(model).keep_ratio < 0.65


# -- unsupported setups ------------------------------------------------------------------------------------------------


def test_other_families_raise_with_reason() -> None:
    model = OTHERS["vipllava"].build()
    was = snapshot(model)
    with pytest.raises(UnsupportedSetupError, match="tome cannot act in the tower of 'vipllava', where the"):
        tokenprune.patch(model, "tome", keep=0.5)
    assert snapshot(model) == was and not tokenprune.is_patched(model)


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
    was = snapshot(model)
    with pytest.raises(error, match=words):
        tokenprune.patch(model, "tome", **options)
    assert snapshot(model) == was


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
    encoded = model.model.get_image_features(inputs["pixel_values"])
    with tokenprune.patched(model, "tome", keep=0.5):
        with pytest.raises(UnsupportedSetupError, match="vision_feature_layer=-2 of the config, not for -1"):
            model(**inputs, vision_feature_layer=-1)
        plain = {name: value for name, value in inputs.items() if name != "pixel_values"}
        with pytest.raises(UnsupportedSetupError, match="not encoded by the patched model"):
            model(**plain, mm_encoder_outputs={"image": encoded})
        model(**plain | {"input_ids": plain["input_ids"].clamp(min=16)})  # text only
    model = build(onevision)
    with tokenprune.patched(model, "tome", keep=0.5):
        towers: list[Any] = []
        handle = model.model.vision_tower.register_forward_pre_hook(lambda module, args: towers.append(args))
        with pytest.raises(UnsupportedSetupError, match="video features"):
            model(**onevision.make_inputs(images=(0,), video=True))
        handle.remove()
        assert not towers, "the tower ran before the refusal"
        with pytest.raises(UnsupportedSetupError, match="interpolates"):
            # Features of one tile for two tiles.
            arguments = image_arguments(onevision.make_inputs(rows=1))
            model.model.get_image_features(**arguments, vision_aspect_ratio="anyres_max_1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_raises(reentrant: bool, build) -> None:
    """Re-entrant checkpointing runs blocks without gradients, and again for the gradients of their input."""
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs()
    model.train()
    tower_of(model).gradient_checkpointing_enable({"use_reentrant": reentrant})
    with (
        tokenprune.patched(model, "tome", keep=0.5),
        pytest.raises(UnsupportedSetupError, match="checkpointing"),
    ):
        model(**inputs)


@torch.no_grad()
def test_later_method_without_surplus_drops_no_tokens(build) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    with tokenprune.patched(model, ["tome", "fastv"], keep=[0.5, 20], record=True):
        model(**inputs)
        assert [cut.method for cut in tokenprune.stats(model).cuts] == ["tome"]
