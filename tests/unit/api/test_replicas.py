# SPDX-License-Identifier: Apache-2.0
"""Copies, replicas and parallel wrappers of a patched model run their own weights, or are refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tokenprune
from families import FAMILIES
from tokenprune import UnsupportedSetupError

METHODS = ["divprune", "fastv", "tome"]


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
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs()
    with tokenprune.patched(model, method, keep=0.4):
        want = model(**inputs).logits
        with pytest.raises(UnsupportedSetupError, match=r"replica .*DistributedDataParallel"):
            replicate(model)(**inputs)
        assert torch.equal(model(**inputs).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_functional_call_runs_the_weights_that_it_is_given(method: str) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs()
    other = copy.deepcopy(model)
    weights = {name: torch.zeros_like(other.get_parameter(name)) for name in tower_names(other)}
    for name, weight in weights.items():
        other.get_parameter(name).copy_(weight)
    with tokenprune.patched(model, method, keep=0.4), tokenprune.patched(other, method, keep=0.4):
        want = other(**inputs).logits
        got = torch.func.functional_call(model, weights, (), inputs).logits
        assert torch.equal(got, want) and not torch.equal(model(**inputs).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_a_shallow_copy_and_a_partial_are_the_same_model(method: str) -> None:
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs()
    with tokenprune.patched(model, method, keep=0.4):
        want, tokens = model(**inputs).logits, model.generate(**inputs, max_new_tokens=3)
        other = copy.copy(model)
        assert torch.equal(other(**inputs).logits, want)
        assert torch.equal(functools.partial(other.generate, max_new_tokens=3)(**inputs), tokens)
        assert torch.equal(nn.DataParallel(model)(**inputs).logits, want)  # one process without GPUs makes no replica


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("order", ["wrapper first", "patch first"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.parametrize("method", METHODS)
def test_parallel_wrappers_train_as_one_process(method: str, wrapper: str, order: str) -> None:
    """The logits and the gradients are those of the patched model without a wrapper."""
    family = FAMILIES["llava"]
    model, inputs = family.build(), family.make_inputs()

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
