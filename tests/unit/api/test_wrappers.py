# SPDX-License-Identifier: Apache-2.0
"""Wrappers, adapters, copies and replicas of a patched model find its patch, run their own weights, or are refused."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tokenprune
from basics import snapshot
from each import each
from families import FAMILIES
from tokenprune import AlreadyPatchedError, NotPatchedError, OptionError, UnsupportedModelError, UnsupportedSetupError

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
    model, inputs = FAMILIES[name].prepare()
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
    model, inputs = FAMILIES["llava"].prepare()
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
    model, inputs = FAMILIES["llava"].prepare()
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


@each("method, target, saved", [("tome", ".*visual.*qkv", None), ("towerdrop", ".*language_model.*q_proj", ["merger"])])
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


def replicate(module: nn.Module) -> Any:
    """Return a replica as nn.DataParallel makes it for a GPU, with parameters of its own."""
    replica = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        replica.__dict__[name] = None if parameter is None else parameter.detach().clone()
    replica._buffers = dict(module._buffers)
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicate(child)
    return replica


def tower_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "vision" in name or "visual" in name]


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl", "blip-2"])
def test_a_replica_is_refused(name: str, method: str) -> None:
    model, inputs = FAMILIES[name].prepare()
    with tokenprune.patched(model, method, keep=0.4):
        want = model(**inputs).logits
        with pytest.raises(UnsupportedSetupError, match=r"replica .*DistributedDataParallel"):
            replicate(model)(**inputs)
        assert torch.equal(model(**inputs).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS[:3])
def test_functional_call_runs_the_weights_that_it_is_given(method: str) -> None:
    model, inputs = FAMILIES["llava"].prepare()
    other = copy.deepcopy(model)
    weights = {name: torch.zeros_like(other.get_parameter(name)) for name in tower_names(other)}
    for name, weight in weights.items():
        other.get_parameter(name).copy_(weight)
    with tokenprune.patched(model, method, keep=0.4), tokenprune.patched(other, method, keep=0.4):
        want = other(**inputs).logits
        got = torch.func.functional_call(model, weights, (), inputs).logits
        assert torch.equal(got, want) and not torch.equal(model(**inputs).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS[:3])
def test_a_shallow_copy_and_a_partial_are_the_same_model(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The suite registers a device of its own, which has no memory.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: None)
    model, inputs = FAMILIES["llava"].prepare()
    parallel = nn.DataParallel(model)
    with pytest.raises(UnsupportedModelError, match=r"DataParallel wraps the model\. Patch the model before wrapping"):
        tokenprune.patch(parallel, method)
    with tokenprune.patched(model, method, keep=0.4):
        want, tokens = model(**inputs).logits, model.generate(**inputs, max_new_tokens=3)
        other = copy.copy(model)
        assert torch.equal(other(**inputs).logits, want)
        assert torch.equal(functools.partial(other.generate, max_new_tokens=3)(**inputs), tokens)
        assert torch.equal(parallel(**inputs).logits, want)  # one process without GPUs makes no replica
        assert tokenprune.stats(parallel.module).keep_ratio < 0.6


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("order", ["wrapper first", "patch first"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("method", METHODS[:3])
def test_parallel_wrappers_train_as_one_process(method: str, wrapper: str, order: str) -> None:
    model, inputs = FAMILIES["llava"].prepare()

    def step(run: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logits = run(**inputs).logits[:, -1]
        logits.logsumexp(-1).sum().backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return logits, {
            name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()
        }

    def wrap() -> Any:
        if wrapper == "ddp":
            return DistributedDataParallel(model, find_unused_parameters=True)
        for layer in model.model.language_model.layers:
            fully_shard(layer)
        return fully_shard(model)

    with tokenprune.patched(model, method, keep=0.4):
        logits, grads = step(model)
    if order == "patch first":
        tokenprune.patch(model, method, keep=0.4)
        run = wrap()
    else:
        run = wrap()
        tokenprune.patch(model, method, keep=0.4)
    got, got_grads = step(run)
    assert torch.equal(got, logits)
    assert {name: torch.equal(grad, grads[name]) for name, grad in got_grads.items()} == dict.fromkeys(grads, True)
    assert tokenprune.stats(model).keep_ratio < 0.6
