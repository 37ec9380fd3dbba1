# SPDX-License-Identifier: Apache-2.0
"""Offloaded caches give the same answers, with keys on the host between two steps.

Without a GPU, streams are simulated. One test also simulates the device (far_device.py), where mixing host and device
tensors raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import tokenprune
from cached_runs import check_same, generate
from far_device import Far, counting, far_inputs, to_far
from oracle import close
from tokenprune import UnsupportedSetupError
from tokenprune.integrations.hf.cache.layer_storage import read_keys
from zoo import FAMILIES

METHODS = ["divprune", "fastv", ["divprune", "fastv"]]


class Stream:
    """Runs everything at once; `waits` counts the waits for another stream."""

    waits = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None:
        Stream.waits += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stream]]:
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(Stream, "waits", 0)
    return Stream


def check_by_name(model: Any, inputs: Any, method: Any, kind: str) -> None:
    with tokenprune.patched(model, method, keep=0.4):
        plain = {"cache_implementation": "static"} if kind == "offloaded_static" else {}
        want, before = generate(model, inputs, **plain), tokenprune.stats(model)
        got, after = generate(model, inputs, cache_implementation=kind), tokenprune.stats(model)
        assert got.past_key_values.offloading
        check_same(got, want)
        assert after.kv_bytes == before.kv_bytes and after.kv_bytes_full == before.kv_bytes_full
        beams = [generate(model, inputs, num_beams=2, **options) for options in (plain, {"cache_implementation": kind})]
        assert torch.equal(beams[0].sequences, beams[1].sequences)


@torch.no_grad()
@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_by_name(name: str, method: Any, kind: str, build, streams) -> None:
    family = FAMILIES[name]
    check_by_name(build(family), family.make_inputs(padding="left"), method, kind)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU for real streams")
@torch.no_grad()
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_on_a_gpu(method: Any, kind: str) -> None:
    family = FAMILIES["qwen2_5_vl"]
    inputs = {name: x.cuda() for name, x in family.make_inputs(padding="left").items()}
    check_by_name(family.build().cuda(), inputs, method, kind)


@torch.no_grad()
@pytest.mark.parametrize("method", ["fastv", "pyramiddrop", "dyrate"])
def test_what_lies_on_the_host(method: str, streams) -> None:
    """pyramiddrop reads a layer's keys before the layer runs in a second turn; dyrate hides keys in the second step."""
    family = FAMILIES["llava"]
    model, inputs = family.build("eager"), family.make_inputs(padding=None)
    pruner = tokenprune.method("dyrate", mode="mask") if method == "dyrate" else method
    step = {"input_ids": torch.full((len(inputs["input_ids"]), 1), 20)}
    turn = {name: x for name, x in inputs.items() if name != "attention_mask"}

    def talk(cache: DynamicCache, calls: list[dict[str, Any]]) -> Iterator[Tensor]:
        for call in calls:
            yield model(**call, past_key_values=cache).logits[:, -1]

    calls = [inputs, step, step, turn, step]
    tokenprune.patch(model, pruner, keep=0.4)
    want = list(talk(DynamicCache(config=model.config.text_config), calls))
    to_far(model)
    cache = DynamicCache(config=model.config.text_config, offloading=True)
    with counting():
        for index, logits in enumerate(talk(cache, [far_inputs(call) for call in calls])):
            close(logits.cpu(), want[index])
            # The next layer to be used is already prefetched.
            is_on_device = [isinstance(layer.keys, Far) for layer in cache.layers]
            assert is_on_device == [True] + [False] * (len(is_on_device) - 1)
        waits_before = streams.waits
        keys = read_keys(cache, 1)
        assert isinstance(keys, Far) and streams.waits == waits_before + 1


@torch.no_grad()
def test_methods_that_take_keys_out(build, streams) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    with tokenprune.patched(model, "dyrate", keep=0.4):
        want = generate(model, inputs)
        cache = DynamicCache(config=model.config.text_config, offloading=True)
        with pytest.raises(UnsupportedSetupError, match=r"offloaded cache\. Use mode='mask'"):
            generate(model, inputs, past_key_values=cache)
        assert not cache.get_seq_length()
        assert torch.equal(generate(model, inputs).sequences, want.sequences)
