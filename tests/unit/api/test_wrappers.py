# SPDX-License-Identifier: Apache-2.0
"""A patch belongs to the model that has the decoder: whatever wraps that model finds it there, and may come and go."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tokenprune
from basics import snapshot
from each import each
from tokenprune import AlreadyPatchedError, NotPatchedError, OptionError, UnsupportedSetupError
from zoo import FAMILIES

peft = pytest.importorskip("peft")

METHODS = ["divprune", "fastv", "tome", ["divprune", "fastv"]]


def adapted(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).eval()


@torch.no_grad()
def end(model: Any, inputs: Any) -> torch.Tensor:
    return model(**inputs).logits[:, -1]


@each("method", METHODS)
@each("name", ["llava", "qwen2_5_vl"])
def test_a_patch_of_the_wrapper_is_still_there_after_a_merge(name: str, method: Any) -> None:
    """It can be asked about, and comes off to the bit."""
    family = FAMILIES[name]
    inputs, wrapper = family.make_inputs(images=(2, 1)), adapted(family.build())
    whole = copy.deepcopy(wrapper).merge_and_unload()
    tokenprune.patch(wrapper, method, keep=0.3)
    merged = wrapper.merge_and_unload()
    assert merged is not wrapper and tokenprune.is_patched(merged) and tokenprune.is_patched(wrapper)
    assert "tokenprune:" in repr(merged)
    got = end(merged, inputs)
    assert tokenprune.stats(merged).keep_ratio < 0.5
    with tokenprune.patched(whole, method, keep=0.3):
        assert torch.equal(got, end(whole, inputs))
    with pytest.raises(AlreadyPatchedError):
        tokenprune.patch(merged)
    tokenprune.unpatch(merged)
    assert torch.equal(end(merged, inputs), end(whole, inputs))
    assert not [one for one in snapshot(merged) if "tokenprune" in one] and "tokenprune:" not in repr(merged)
    for one in (merged, wrapper):
        assert not tokenprune.is_patched(one)
        with pytest.raises(NotPatchedError):
            tokenprune.unpatch(one)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_all_that_hold_the_model_speak_of_one_patch(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs()
    tokenprune.patch(model, "divprune", keep=0.5)
    wrapper = adapted(model)
    every = [wrapper, wrapper.base_model, model, model.model]
    end(wrapper, inputs)
    assert all(tokenprune.is_patched(one) for one in every)
    assert {tokenprune.stats(one).keep_ratio for one in every} == {tokenprune.stats(model).keep_ratio}
    for one in every:
        with pytest.raises(AlreadyPatchedError):
            tokenprune.patch(one, "fastv")
        tokenprune.patch(one, "fastv", keep=0.3, replace=True)
        end(wrapper, inputs)
        assert [removal.method for removal in tokenprune.stats(wrapper).removals] == ["fastv"]
        with tokenprune.patched(one, "divprune", keep=0.5, replace=True):
            end(wrapper, inputs)
            assert [removal.method for removal in tokenprune.stats(model).removals] == ["divprune"]
        assert tokenprune.is_patched(wrapper)
    with pytest.raises(OptionError):
        tokenprune.patch(wrapper, "fastv", layer=99, replace=True)
    assert tokenprune.is_patched(model)
    for one in every:
        tokenprune.unpatch(one)
        assert not any(tokenprune.is_patched(other) for other in every)
        tokenprune.patch(one, "divprune", keep=0.5)
    tokenprune.unpatch(model)


def test_an_adapter_of_the_tower_that_was_merged_is_named() -> None:
    """What was watched of the tower went with it; patched again, the model is pruned as any other."""
    family = FAMILIES["qwen2_5_vl"]
    inputs, config = family.make_inputs(), peft.LoraConfig(target_modules=r".*visual.*qkv", init_lora_weights=False)
    wrapper = tokenprune.patch(peft.get_peft_model(family.build(), config).eval(), "tome", keep=0.3)
    end(wrapper, inputs)
    merged = wrapper.merge_and_unload()
    with pytest.raises(UnsupportedSetupError, match="patch it again"):
        end(merged, inputs)
    tokenprune.patch(merged, "tome", keep=0.3, replace=True)
    end(merged, inputs)
    assert tokenprune.stats(merged).keep_ratio < 0.4


def test_a_merge_inside_of_a_with_block() -> None:
    wrapper = adapted(FAMILIES["llava"].build())
    with tokenprune.patched(wrapper, "divprune", keep=0.5):
        merged = wrapper.merge_and_unload()
        assert tokenprune.is_patched(merged)
    assert not tokenprune.is_patched(merged)


def test_without_the_adapter_the_base_is_pruned_as_it_is() -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs()
    with tokenprune.patched(model, "fastv", keep=0.3):
        plain = end(model, inputs)
    wrapper = tokenprune.patch(adapted(model), "fastv", keep=0.3)
    with wrapper.disable_adapter():
        assert torch.equal(end(wrapper, inputs), plain)
    assert not torch.allclose(end(wrapper, inputs), plain)
    unloaded = wrapper.unload()
    assert torch.equal(end(unloaded, inputs), plain) and tokenprune.is_patched(unloaded)


def test_a_copy_of_a_wrapper_has_a_patch_of_its_own() -> None:
    family = FAMILIES["llava"]
    wrapper, inputs = tokenprune.patch(adapted(family.build()), "divprune", keep=0.3), family.make_inputs()
    want, other = end(wrapper, inputs), copy.deepcopy(wrapper)
    merged = other.merge_and_unload()
    end(merged, family.make_inputs(images=(2, 1)))
    assert tokenprune.stats(merged).visual_tokens_in > tokenprune.stats(wrapper).visual_tokens_in
    tokenprune.unpatch(merged)
    assert tokenprune.is_patched(wrapper) and torch.equal(end(wrapper, inputs), want)


def test_adapters_are_saved_as_without_a_patch(tmp_path: Path) -> None:
    wrapper = adapted(FAMILIES["llava"].build())
    wrapper.save_pretrained(tmp_path / "plain")
    with tokenprune.patched(wrapper, "divprune", keep=0.3):
        wrapper.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes(), file.name


class Holder(nn.Module):
    """A wrapper of one's own, which lets its model be seen."""

    def __init__(self, vlm: nn.Module) -> None:
        super().__init__()
        self.vlm, self.config = vlm, vlm.config

    def forward(self, **inputs: Any) -> Any:
        return self.vlm(**inputs)


@pytest.mark.parametrize("wrap", [Holder, lambda model: torch.compile(model, backend="eager")], ids=["own", "compiled"])
def test_other_wrappers(wrap: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs()
    want = end(model, inputs)
    wrapper = wrap(model)
    was = snapshot(model)
    tokenprune.patch(wrapper, "divprune", keep=0.3)
    end(model, inputs)
    assert tokenprune.is_patched(model) and tokenprune.stats(wrapper).keep_ratio == tokenprune.stats(model).keep_ratio
    assert "tokenprune:" in repr(model)
    tokenprune.unpatch(model)
    assert not tokenprune.is_patched(wrapper) and torch.equal(end(model, inputs), want) and snapshot(model) == was


def test_what_is_no_model_has_no_patch() -> None:
    assert not tokenprune.is_patched(None) and not tokenprune.is_patched(object())


@each(
    "method, target, saved",
    [("tome", ".*visual.*qkv", None), ("towerdrop", ".*language_model.*q_proj", ["merger"])],
)
def test_an_adapter_that_hides_a_hook_is_refused(method: str, target: str, saved: list[str] | None) -> None:
    """Hooks of the patch stand on the modules below the adapter, and would see the weights without it."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = tokenprune.patch(family.build(), method, keep=0.3), family.make_inputs()
    plain = end(model, inputs)
    config = peft.LoraConfig(target_modules=target, modules_to_save=saved, init_lora_weights=False)
    wrapper = peft.get_peft_model(model, config).eval()
    for run in (partial(end, wrapper, inputs), lambda: wrapper.generate(**inputs, max_new_tokens=2)):
        with pytest.raises(UnsupportedSetupError, match=r"visual\..* was replaced .*peft\..*patch it again"):
            run()
    features = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with pytest.raises(UnsupportedSetupError, match="patch it again"):
        model.get_image_features(**features)
    unloaded = wrapper.unload()
    if saved is None:  # PEFT leaves a copy in the place of what it trained whole
        assert torch.equal(end(unloaded, inputs), plain)
    tokenprune.patch(peft.get_peft_model(model, config).eval(), method, keep=0.3, replace=True)
    end(model, inputs)
    assert tokenprune.stats(model).keep_ratio < 0.5
