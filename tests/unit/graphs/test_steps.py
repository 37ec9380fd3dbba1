# SPDX-License-Identifier: Apache-2.0
"""Decoding steps with graphs. Without a GPU the layers run again on the buffers, instead of a replay."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import tokenprune
from graphed_answers import STEPS, continue_turn, counts, generate, same, same_logits
from oracle import close
from tokenprune.integrations.hf.graphs import Graphs, graphed
from tokenprune.integrations.hf.graphs.walk import LEARNING_STEP
from zoo import FAMILIES

# Methods that cut before the decoder, inside the decoder, and while decoding.
METHODS = ["divprune", "visionzip", "tome", "fastv", "dart", "pyramiddrop", "vscan", "vtw", "dyrate"]


@pytest.mark.parametrize("images", [(1,), (1, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, images: tuple[int, ...], build: Any) -> None:
    """Ragged rows have masks, and cuts inside the decoder leave layers of different lengths."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=images, padding="left")
    with tokenprune.patched(model, method, keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, method, keep=0.4, graphs=Graphs(cache_step=32)):
        for _ in range(3):
            same(generate(model, inputs), want)
        graphs = counts(model)
    assert graphs.step_hits == 3 * (STEPS - 1) - 1 and graphs.step_misses == {LEARNING_STEP: 1}


@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "internvl", "gemma3"])
def test_positions_and_masks(name: str, method: str, build: Any) -> None:
    family = FAMILIES[name]
    model = build(family)
    prompts = [family.make_inputs(images=images, padding="left") for images in ((1,), (1, 2), (1,), (1, 2))]
    with tokenprune.patched(model, method, keep=0.4):
        expected = [generate(model, inputs) for inputs in prompts]
    with tokenprune.patched(model, method, keep=0.4, graphs=Graphs(cache_step=4)):
        for inputs, want in zip(prompts, expected, strict=True):
            same(generate(model, inputs), want)
        assert counts(model).step_hits >= 2 * (STEPS - 1), counts(model)


def test_eager_attention(build: Any) -> None:
    """Eager masks are additive in the prefill and in each step, and hide padding from the prefill on."""
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 2), padding="left")
    with tokenprune.patched(model, "divprune", keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            same_logits(generate(model, inputs), want)
        assert counts(model).hits == 1 and counts(model).step_hits == 2 * (STEPS - 1) - 1


def test_without_a_method(build: Any) -> None:
    family = FAMILIES["llava"]
    model = build(family)
    prompts = [family.make_inputs(images=images, padding="left") for images in ((1,), (1, 2))]
    expected = [generate(model, inputs) for inputs in prompts]
    with graphed(model):
        for inputs, want in zip((*prompts, *prompts), (*expected, *expected), strict=True):
            got = generate(model, inputs)
            same(got, want)
            assert type(got.past_key_values) is DynamicCache
            assert {type(layer) for layer in got.past_key_values.layers} == {DynamicLayer}


def test_capacities(build: Any) -> None:
    """A cache that outgrows its buffers moves into larger buffers without changing the answer."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4):
        want = generate(model, inputs, max_new_tokens=40, min_new_tokens=40)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(cache_step=8)):
        for _ in range(2):
            same(generate(model, inputs, max_new_tokens=40, min_new_tokens=40), want)
        captured = counts(model).captured
        assert captured >= 5
        generate(model, inputs, max_new_tokens=40)
        assert counts(model).captured == captured


def test_capacity_rule() -> None:
    """Buffers exceed a cache by less than a step, or a quarter of the cache if that is more."""
    graphs = Graphs(cache_step=16)
    for length in range(1, 3000, 7):
        capacity = graphs.capacity(length)
        assert length <= capacity < length + max(16, length / 4 + 1) and graphs.capacity(capacity) == capacity


@pytest.mark.parametrize("images", [(1,), (1, 2), (0, 2)])
@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_next_turns(method: str, images: tuple[int, ...], build: Any) -> None:
    """Later questions on several caches alternate without affecting each other."""
    family = FAMILIES["llava"]
    model = build(family)
    prompts = [family.make_inputs(images=images, padding="left", seed=seed) for seed in range(3)]

    def talk() -> list[Any]:
        firsts = [generate(model, inputs) for inputs in prompts]
        kept = [copy.deepcopy(first.past_key_values) for first in firsts]
        answers = [continue_turn(model, first, inputs) for first, inputs in zip(firsts, prompts, strict=True)]
        single = [
            continue_turn(model, SimpleNamespace(sequences=first.sequences, past_key_values=cache), inputs, new=(9,))
            for first, cache, inputs in zip(firsts, kept, prompts, strict=True)
        ]
        return [*answers, *single]

    with tokenprune.patched(model, method, keep=0.4):
        expected = talk()
    with tokenprune.patched(model, method, keep=0.4, graphs=True):
        for got, want in zip(talk(), expected, strict=True):
            same(got, want)
        assert counts(model).step_hits > 3 * (STEPS - 1)


def test_steps_after_a_prompt_without_images(build: Any) -> None:
    """Without a cut all layers are one group, and with a cut the layers after it are another one."""
    family = FAMILIES["llava"]
    model = build(family)
    prompts = [family.make_inputs(images=images) for images in ((0,), (1,))]
    with tokenprune.patched(model, "fastv", keep=0.4):
        expected = [generate(model, inputs) for inputs in prompts]
    with tokenprune.patched(model, "fastv", keep=0.4, graphs=True):
        for inputs, want in zip((*prompts, *prompts), (*expected, *expected), strict=True):
            same(generate(model, inputs), want)
        assert counts(model).step_hits >= 2 * (STEPS - 1)


def test_steps_that_prune_after_a_warm_up(build: Any) -> None:
    """The recorded step does not prune yet, and later steps leave layers of two lengths."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    options = dict(layer=2, warmup=3, update_every=1, keep=0.5)
    with tokenprune.patched(model, "dyrate", **options):
        want = generate(model, inputs)
        assert len({layer.keys.shape[2] for layer in want.past_key_values.layers}) > 1
    with tokenprune.patched(model, "dyrate", **options, graphs=True):
        for _ in range(2):
            same(generate(model, inputs), want)
        assert counts(model).step_hits >= STEPS - 1


def test_kept_tensors_do_not_change(build: Any) -> None:
    """Later prompts and steps do not overwrite tensors of a cache that the caller keeps."""
    family = FAMILIES["llava"]
    model = build(family)
    prompts = [family.make_inputs(images=(1,), seed=seed) for seed in range(3)]
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        generate(model, prompts[0])
        kept = []
        for inputs in prompts:
            cache = generate(model, inputs).past_key_values
            kept.append([cache.layers[1].keys[0, :, ::2], cache.layers[3].values])
            del cache
        copies = [[tensor.clone() for tensor in tensors] for tensors in kept]
        captured = counts(model).captured
        for inputs in prompts:
            generate(model, inputs)
        assert all(all(map(torch.equal, *pair)) for pair in zip(kept, copies, strict=True))
        kept.clear()
        gc.collect()
        for inputs in prompts:
            generate(model, inputs)
        assert counts(model).captured <= captured + 1  # unshared buffers are reused


def branch(model: Any, cache: Any, token: int) -> Tensor:
    ids = torch.full((len(cache.layers[0].keys), 1), token)
    with torch.no_grad():
        return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


CHANGES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(-2),
    "crop of some layers": lambda cache: [layer.crop(-1) for layer in cache.layers[2:]],
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "deepcopy": lambda cache: cache.__dict__.update(copy.deepcopy(cache).__dict__),
    "copies of layers": lambda cache: setattr(cache, "layers", [copy.copy(layer) for layer in cache.layers]),
    "clones": lambda cache: [setattr(layer, "keys", layer.keys.clone()) for layer in cache.layers],
    "in place": lambda cache: [layer.values.mul_(0.5) for layer in cache.layers],
    "rewind": lambda cache: [
        layer.__dict__.update(keys=layer.keys[:, :, :-3], values=layer.values[:, :, :-3]) for layer in cache.layers
    ],
}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_caches(change: str, patched: bool, build: Any) -> None:
    """Steps follow a change of the cache, and tensors taken before the change stay valid."""
    if patched and change in ("rewind", "crop of some layers"):
        pytest.skip("the positions of a pruned cache are changed by crop only")
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 2))

    def run() -> list[Any]:
        cache = generate(model, inputs).past_key_values
        before = [(layer.keys, layer.values) for layer in cache.layers]
        outputs = [branch(model, cache, 20), branch(model, cache, 21)]
        CHANGES[change](cache)
        outputs += [branch(model, cache, 22), branch(model, cache, 23)]
        for states in before if change != "in place" else []:
            outputs += [states[0].clone(), states[1].clone()]
        return [*outputs, *(layer.keys.clone() for layer in cache.layers)]

    keep = 0.4 if patched else 1.0
    with tokenprune.patched(model, "divprune", keep=keep):
        expected = run()
    with tokenprune.patched(model, "divprune", keep=keep, graphs=True):
        run()
        for got, want in zip(run(), expected, strict=True):
            close(got, want)
        assert counts(model).step_hits >= 2 * STEPS
