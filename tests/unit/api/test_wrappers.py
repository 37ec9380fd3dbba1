# SPDX-License-Identifier: Apache-2.0
"""Wrappers, adapters, copies and replicas of a patched model share its patch with their own weights, or are refused."""

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


def add_lora(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(target_modules=r".*language_model.*(q_proj|v_proj)", init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(model, config).eval()


@torch.no_grad()
def compute_logits(model: Any, inputs: Any) -> torch.Tensor:
    return model(**inputs).logits[:, -1]


@each("method", METHODS)
@each("name", ["llava", "qwen2_5_vl"])
def test_a_patch_survives_merge_and_unload(name: str, method: Any) -> None:
    family = FAMILIES[name]
    inputs, wrapper = family.make_inputs(images=(2, 1)), add_lora(family.build())
    unpatched = copy.deepcopy(wrapper).merge_and_unload()
    tokenprune.patch(wrapper, method, keep=0.3)
    merged = wrapper.merge_and_unload()
    assert merged is not wrapper and tokenprune.is_patched(merged) and tokenprune.is_patched(wrapper)
    assert "tokenprune:" in repr(merged)
    actual = compute_logits(merged, inputs)
    assert tokenprune.stats(merged).keep_ratio < 0.5
    with tokenprune.patched(unpatched, method, keep=0.3):
        assert torch.equal(actual, compute_logits(unpatched, inputs))
    with pytest.raises(AlreadyPatchedError):
        tokenprune.patch(merged)
    tokenprune.unpatch(merged)
    assert torch.equal(compute_logits(merged, inputs), compute_logits(unpatched, inputs))
    assert not [key for key in snapshot(merged) if "tokenprune" in key] and "tokenprune:" not in repr(merged)
    for holder in (merged, wrapper):
        assert not tokenprune.is_patched(holder)
        with pytest.raises(NotPatchedError):
            tokenprune.unpatch(holder)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_all_wrappers_of_a_model_share_one_patch(name: str) -> None:
    model, inputs = FAMILIES[name].prepare()
    tokenprune.patch(model, "divprune", keep=0.5)
    wrapper = add_lora(model)
    holders = [wrapper, wrapper.base_model, model, model.model]
    compute_logits(wrapper, inputs)
    assert all(tokenprune.is_patched(holder) for holder in holders)
    assert {tokenprune.stats(holder).keep_ratio for holder in holders} == {tokenprune.stats(model).keep_ratio}
    for holder in holders:
        with pytest.raises(AlreadyPatchedError):
            tokenprune.patch(holder, "fastv")
        tokenprune.patch(holder, "fastv", keep=0.3, replace=True)
        compute_logits(wrapper, inputs)
        assert [removal.method for removal in tokenprune.stats(wrapper).removals] == ["fastv"]
        with tokenprune.patched(holder, "divprune", keep=0.5, replace=True):
            compute_logits(wrapper, inputs)
            assert [removal.method for removal in tokenprune.stats(model).removals] == ["divprune"]
        assert tokenprune.is_patched(wrapper)
    with pytest.raises(OptionError):
        tokenprune.patch(wrapper, "fastv", layer=99, replace=True)
    assert tokenprune.is_patched(model)
    for holder in holders:
        tokenprune.unpatch(holder)
        assert not any(tokenprune.is_patched(other) for other in holders)
        tokenprune.patch(holder, "divprune", keep=0.5)
    tokenprune.unpatch(model)


def test_a_merged_adapter_of_the_tower_is_refused() -> None:
    """The merge removes modules with hooks. After a new patch the model is pruned as usual."""
    family = FAMILIES["qwen2_5_vl"]
    inputs, config = family.make_inputs(), peft.LoraConfig(target_modules=r".*visual.*qkv", init_lora_weights=False)
    wrapper = tokenprune.patch(peft.get_peft_model(family.build(), config).eval(), "tome", keep=0.3)
    compute_logits(wrapper, inputs)
    merged = wrapper.merge_and_unload()
    with pytest.raises(UnsupportedSetupError, match="patch it again"):
        compute_logits(merged, inputs)
    tokenprune.patch(merged, "tome", keep=0.3, replace=True)
    compute_logits(merged, inputs)
    assert tokenprune.stats(merged).keep_ratio < 0.4


def test_a_merge_inside_patched() -> None:
    wrapper = add_lora(FAMILIES["llava"].build())
    with tokenprune.patched(wrapper, "divprune", keep=0.5):
        merged = wrapper.merge_and_unload()
        assert tokenprune.is_patched(merged)
    assert not tokenprune.is_patched(merged)


def test_a_disabled_adapter_gives_the_pruned_base_model() -> None:
    model, inputs = FAMILIES["llava"].prepare()
    with tokenprune.patched(model, "fastv", keep=0.3):
        without_adapter = compute_logits(model, inputs)
    wrapper = tokenprune.patch(add_lora(model), "fastv", keep=0.3)
    with wrapper.disable_adapter():
        assert torch.equal(compute_logits(wrapper, inputs), without_adapter)
    assert not torch.allclose(compute_logits(wrapper, inputs), without_adapter)
    unloaded = wrapper.unload()
    assert torch.equal(compute_logits(unloaded, inputs), without_adapter) and tokenprune.is_patched(unloaded)


def test_a_copy_of_a_wrapper_has_an_independent_patch() -> None:
    family = FAMILIES["llava"]
    wrapper, inputs = tokenprune.patch(add_lora(family.build()), "divprune", keep=0.3), family.make_inputs()
    expected, other = compute_logits(wrapper, inputs), copy.deepcopy(wrapper)
    merged = other.merge_and_unload()
    compute_logits(merged, family.make_inputs(images=(2, 1)))
    assert tokenprune.stats(merged).visual_tokens_in > tokenprune.stats(wrapper).visual_tokens_in
    tokenprune.unpatch(merged)
    assert tokenprune.is_patched(wrapper) and torch.equal(compute_logits(wrapper, inputs), expected)


def test_saved_adapters_do_not_contain_the_patch(tmp_path: Path) -> None:
    wrapper = add_lora(FAMILIES["llava"].build())
    wrapper.save_pretrained(tmp_path / "plain")
    with tokenprune.patched(wrapper, "divprune", keep=0.3):
        wrapper.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "plain").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes(), file.name


class Holder(nn.Module):
    """A custom wrapper with a visible model."""

    def __init__(self, vlm: nn.Module) -> None:
        super().__init__()
        self.vlm, self.config = vlm, vlm.config

    def forward(self, **inputs: Any) -> Any:
        return self.vlm(**inputs)


@pytest.mark.parametrize("wrap", [Holder, lambda model: torch.compile(model, backend="eager")], ids=["own", "compiled"])
def test_other_wrappers(wrap: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare()
    expected = compute_logits(model, inputs)
    wrapper = wrap(model)
    before = snapshot(model)
    tokenprune.patch(wrapper, "divprune", keep=0.3)
    compute_logits(model, inputs)
    assert tokenprune.is_patched(model) and tokenprune.stats(wrapper).keep_ratio == tokenprune.stats(model).keep_ratio
    assert "tokenprune:" in repr(model)
    tokenprune.unpatch(model)
    assert (
        not tokenprune.is_patched(wrapper)
        and torch.equal(compute_logits(model, inputs), expected)
        and snapshot(model) == before
    )


def test_other_objects_are_not_patched() -> None:
    assert not tokenprune.is_patched(None) and not tokenprune.is_patched(object())


@each("method, target, saved", [("tome", ".*visual.*qkv", None), ("towerdrop", ".*language_model.*q_proj", ["merger"])])
def test_an_adapter_that_hides_a_hook_is_refused(method: str, target: str, saved: list[str] | None) -> None:
    """The patch has hooks on modules below the adapter, which would not see the adapter's weights."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = tokenprune.patch(family.build(), method, keep=0.3), family.make_inputs()
    expected = compute_logits(model, inputs)
    config = peft.LoraConfig(target_modules=target, modules_to_save=saved, init_lora_weights=False)
    wrapper = peft.get_peft_model(model, config).eval()
    for run in (partial(compute_logits, wrapper, inputs), lambda: wrapper.generate(**inputs, max_new_tokens=2)):
        with pytest.raises(UnsupportedSetupError, match=r"visual\..* was replaced .*peft\..*patch it again"):
            run()
    features = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with pytest.raises(UnsupportedSetupError, match="patch it again"):
        model.get_image_features(**features)
    unloaded = wrapper.unload()
    if saved is None:  # PEFT leaves a copy of modules that it trained completely
        assert torch.equal(compute_logits(unloaded, inputs), expected)
    tokenprune.patch(peft.get_peft_model(model, config).eval(), method, keep=0.3, replace=True)
    compute_logits(model, inputs)
    assert tokenprune.stats(model).keep_ratio < 0.5


def replicate(module: nn.Module) -> Any:
    """Return a replica with copied parameters, as nn.DataParallel creates for a GPU."""
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
        expected = model(**inputs).logits
        with pytest.raises(UnsupportedSetupError, match=r"replica .*DistributedDataParallel"):
            replicate(model)(**inputs)
        assert torch.equal(model(**inputs).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS[:3])
def test_functional_call_uses_the_given_weights(method: str) -> None:
    model, inputs = FAMILIES["llava"].prepare()
    other = copy.deepcopy(model)
    weights = {name: torch.zeros_like(other.get_parameter(name)) for name in tower_names(other)}
    for name, weight in weights.items():
        other.get_parameter(name).copy_(weight)
    with tokenprune.patched(model, method, keep=0.4), tokenprune.patched(other, method, keep=0.4):
        expected = other(**inputs).logits
        actual = torch.func.functional_call(model, weights, (), inputs).logits
        assert torch.equal(actual, expected) and not torch.equal(model(**inputs).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS[:3])
def test_shallow_copies_and_partials_share_the_patch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The test suite registers a custom device without memory.
    data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
    monkeypatch.setattr(data_parallel, "_get_available_device_type", lambda: None)
    model, inputs = FAMILIES["llava"].prepare()
    parallel = nn.DataParallel(model)
    with pytest.raises(UnsupportedModelError, match=r"DataParallel wraps the model\. Patch the model before wrapping"):
        tokenprune.patch(parallel, method)
    with tokenprune.patched(model, method, keep=0.4):
        expected, tokens = model(**inputs).logits, model.generate(**inputs, max_new_tokens=3)
        other = copy.copy(model)
        assert torch.equal(other(**inputs).logits, expected)
        assert torch.equal(functools.partial(other.generate, max_new_tokens=3)(**inputs), tokens)
        assert torch.equal(parallel(**inputs).logits, expected)  # a single process without GPUs creates no replica
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
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
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
    actual, actual_grads = step(run)
    assert torch.equal(actual, logits)
    assert {name: torch.equal(grad, grads[name]) for name, grad in actual_grads.items()} == dict.fromkeys(grads, True)
    assert tokenprune.stats(model).keep_ratio < 0.6
