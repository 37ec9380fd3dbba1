# SPDX-License-Identifier: Apache-2.0
"""Static caches keep the same tokens as dynamic caches in fewer slots, and decode steps compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

import tokenprune
from cached_runs import check_logits, check_same, generate, talk
from families.special import FAMILIES as SPECIAL
from oracle import close
from selection import REASONS
from tokenprune import UnsupportedSetupError
from zoo import FAMILIES

METHODS = ["divprune", "fastv", "dart", "tome", ["divprune", "fastv"]]
NAMES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"]
STEPS = 6


def list_slots(cache: Any) -> list[int]:
    return [layer.keys.shape[-2] for layer in cache.layers]


def make_static(model: Any, length: int) -> StaticCache:
    return StaticCache(config=model.config.get_text_config(), max_cache_len=length)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_dynamic_cache(name: str, method: Any, padding: str | None, build) -> None:
    """A cache by name, and a larger cache of the caller. Rows are ragged because image sizes differ."""
    family = FAMILIES[name]
    if method == "tome" and name in ("qwen3_vl", "gemma3"):
        pytest.skip("two families cover merges in the tower")
    model, inputs = build(family), family.make_inputs(padding=padding)
    length = inputs["input_ids"].shape[1]
    with tokenprune.patched(model, method, keep=0.4):
        want = generate(model, inputs)
        before = tokenprune.stats(model)
        named, passed = generate(model, inputs, cache_implementation="static"), make_static(model, 100)
        check_same(named, want)
        after = tokenprune.stats(model)
        check_same(generate(model, inputs, past_key_values=passed), want)
    assert after.width_per_layer == before.width_per_layer and after.prefill_flops == before.prefill_flops
    removed = [length - width for width in after.width_per_layer]
    capacities = [getattr(layer, "max_cache_len", None) for layer in make_static(model, length + STEPS - 1).layers]
    assert max(removed) > 0
    assert list_slots(named.past_key_values) == [
        min(capacity, length + STEPS - 1 - num_removed)
        for capacity, num_removed in zip(capacities, removed, strict=True)
    ]
    layers = named.past_key_values.layers
    assert after.kv_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    sizes = [(layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[-2] for layer in layers]
    full_bytes = sum(size * capacity for size, capacity in zip(sizes, capacities, strict=True))
    assert after.kv_bytes_full == full_bytes
    if name != "gemma3":  # a sliding layer has one more token
        assert after.kv_bytes_tokens == before.kv_bytes_tokens


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_reset_gives_the_slots_back(name: str, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, padding=None)
    cache = make_static(model, 80)
    cache_class, capacities = type(cache), [layer.max_cache_len for layer in cache.layers]
    unpruned = generate(model, inputs)
    for method in ("fastv", "divprune"):
        with tokenprune.patched(model, method, keep=0.4):
            want = generate(model, inputs)
            check_same(generate(model, inputs, past_key_values=cache), want)
            assert min(list_slots(cache)) < capacities[1] and cache.get_max_length() == 80
            cache.reset()
        assert type(cache) is cache_class and [layer.max_cache_len for layer in cache.layers] == capacities
    check_same(generate(model, inputs, past_key_values=cache), unpruned)
    cache.reset()
    with tokenprune.patched(model, "fastv", keep=0.4):
        want = generate(model, inputs)
        check_same(generate(model, inputs, past_key_values=cache), want)  # an initialized layer keeps its slots
    assert list_slots(cache) == capacities


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv", ["divprune", "fastv"]], ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_second_turns(name: str, method: Any, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, padding=None)
    with tokenprune.patched(model, method, keep=0.4):
        want = talk(model, inputs, inputs, DynamicCache(config=model.config.get_text_config()))
        check_logits(talk(model, inputs, inputs, make_static(model, 200)), want)


@torch.no_grad()
def test_positional_images_of_a_later_turn(build) -> None:
    """Positional images of the base model mark a turn instead of a step."""
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    with tokenprune.patched(model, "divprune", keep=0.4):
        cache = make_static(model, 200)
        model.model(ids, pixels, past_key_values=cache)
        first = tokenprune.stats(model)
        model.model(ids, pixels, past_key_values=cache)
        second = tokenprune.stats(model)
    assert second is not first and second.visual_tokens_out == first.visual_tokens_out < first.visual_tokens_in
    assert int(cache.layers[0].cumulative_length) == 2 * first.width_per_layer[0]


@torch.no_grad()
def test_interleaved_generations_and_beams(build) -> None:
    family = FAMILIES["llava"]
    model = build(family)
    first, second = family.make_inputs(padding=None), family.make_inputs(padding=None, images=(2, 1))
    with tokenprune.patched(model, "fastv", keep=0.4):
        want = [generate(model, output) for output in (first, second)]
        caches = [make_static(model, 90), make_static(model, 120)]
        tokens = [output.sequences[:, -STEPS:] for output in want]
        calls = list(zip((first, second), caches, strict=True))
        got = [model(**output, past_key_values=cache).logits[:, -1] for output, cache in calls]
        for step in range(STEPS):
            for index in (0, 1):
                close(got[index], want[index].logits[step])
                if step < STEPS - 1:
                    ids = tokens[index][:, step : step + 1]
                    got[index] = model(input_ids=ids, past_key_values=caches[index]).logits[:, -1]
        want = generate(model, first, num_beams=3)
        got = generate(model, first, num_beams=3, cache_implementation="static")
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_decode_steps_compile(name: str, build) -> None:
    """Steps and later calls of the same length compile once, without graph breaks, also after other models ran."""
    dynamo = torch._dynamo
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(padding=None)
    settings = CompileConfig(backend="eager", fullgraph=True)
    settings._compile_all_devices = True

    def run_compiled(calls: int) -> tuple[int, list[Any]]:
        dynamo.reset()
        dynamo.utils.counters.clear()
        call = partial(generate, model, inputs, cache_implementation="static", compile_config=settings)
        outputs = [call()]
        # Compiled steps must not depend on this thread's record of calls, which now changes.
        with tokenprune.patched(build(family), "uniform", keep=0.4):
            build(family)(**inputs)
            outputs += [call() for _ in range(calls - 1)]
        assert not dynamo.utils.counters["graph_break"]
        return dynamo.utils.counters["stats"]["unique_graphs"], outputs

    unpatched, _ = run_compiled(3)
    # Cuts before the decoder, by the attention of a layer, and by the outputs of its attention and MLP.
    for method in ("divprune", "fastv", "transprune") if name == "llava" else ("divprune", "fastv"):
        # Graphs are for the prefill only: a step compiles as without them.
        use_graphs = method == "divprune"
        with tokenprune.patched(model, method, keep=0.6 if method == "transprune" else 0.4, graphs=use_graphs):
            want = generate(model, inputs)
            num_graphs, outputs = run_compiled(3)
        assert num_graphs == unpatched
        for output in outputs:
            check_same(output, want)
    dynamo.reset()


@torch.no_grad()
def test_unsupported_methods_and_families_are_refused(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    want = generate(model, inputs)
    with tokenprune.patched(model, "dyrate", keep=0.4), pytest.raises(UnsupportedSetupError, match="keeps its slots"):
        generate(model, inputs, cache_implementation="static")
    for name in {"qwen3_5", "gemma4", "llama4"} - REASONS.keys():
        family = SPECIAL[name]
        special = build(family)
        with tokenprune.patched(special, "divprune", keep=0.4), pytest.raises(UnsupportedSetupError, match="static"):
            special(**family.make_inputs(padding=None), past_key_values=make_static(special, 100))
    check_same(generate(model, inputs), want)
