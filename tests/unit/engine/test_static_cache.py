# SPDX-License-Identifier: Apache-2.0
"""Static caches: the same tokens as with a dynamic one, fewer slots, and decode steps that compile as they are."""

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


def slots(cache: Any) -> list[int]:
    return [layer.keys.shape[-2] for layer in cache.layers]


def static(model: Any, length: int) -> StaticCache:
    return StaticCache(config=model.config.get_text_config(), max_cache_len=length)


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_dynamic_cache(name: str, method: Any, padding: str | None, build) -> None:
    """By name, and handed in with room to spare. Rows are ragged: the images of a batch have other sizes."""
    family = FAMILIES[name]
    if method == "tome" and name in ("qwen3_vl", "gemma3"):
        pytest.skip("merges in the tower are tried with two families")
    model, inputs = build(family), family.make_inputs(padding=padding)
    length = inputs["input_ids"].shape[1]
    with tokenprune.patched(model, method, keep=0.4):
        want = generate(model, inputs)
        before = tokenprune.stats(model)
        named, given = generate(model, inputs, cache_implementation="static"), static(model, 100)
        check_same(named, want)
        after = tokenprune.stats(model)
        check_same(generate(model, inputs, past_key_values=given), want)
    assert after.width_per_layer == before.width_per_layer and after.prefill_flops == before.prefill_flops
    removed = [length - width for width in after.width_per_layer]
    made_for = [getattr(layer, "max_cache_len", None) for layer in static(model, length + STEPS - 1).layers]
    assert max(removed) > 0
    assert slots(named.past_key_values) == [
        min(full, length + STEPS - 1 - gone) for full, gone in zip(made_for, removed, strict=True)
    ]
    layers = named.past_key_values.layers
    assert after.kv_bytes == sum(one.keys.nbytes + one.values.nbytes for one in layers)
    sizes = [(one.keys.nbytes + one.values.nbytes) // one.keys.shape[-2] for one in layers]
    full = sum(size * number for size, number in zip(sizes, made_for, strict=True))
    assert after.kv_bytes_full == full
    if name != "gemma3":  # a sliding layer holds one token more
        assert after.kv_bytes_tokens == before.kv_bytes_tokens


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_reset_gives_the_slots_back(name: str, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, padding=None)
    cache = static(model, 80)
    kind, room = type(cache), [layer.max_cache_len for layer in cache.layers]
    full = generate(model, inputs)
    for method in ("fastv", "divprune"):
        with tokenprune.patched(model, method, keep=0.4):
            want = generate(model, inputs)
            check_same(generate(model, inputs, past_key_values=cache), want)
            assert min(slots(cache)) < room[1] and cache.get_max_length() == 80
            cache.reset()
        assert type(cache) is kind and [layer.max_cache_len for layer in cache.layers] == room
    check_same(generate(model, inputs, past_key_values=cache), full)
    cache.reset()
    with tokenprune.patched(model, "fastv", keep=0.4):
        want = generate(model, inputs)
        check_same(generate(model, inputs, past_key_values=cache), want)  # what is laid out stays
    assert slots(cache) == room


@torch.no_grad()
@pytest.mark.parametrize("method", ["divprune", "fastv", ["divprune", "fastv"]], ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_second_turns(name: str, method: Any, build) -> None:
    model, inputs = FAMILIES[name].prepare(build, padding=None)
    with tokenprune.patched(model, method, keep=0.4):
        want = talk(model, inputs, inputs, DynamicCache(config=model.config.get_text_config()))
        check_logits(talk(model, inputs, inputs, static(model, 200)), want)


@torch.no_grad()
def test_images_of_a_later_turn_that_come_by_position(build) -> None:
    """The base model is called as its own class allows; a step is told from a turn by what it is handed."""
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    with tokenprune.patched(model, "divprune", keep=0.4):
        cache = static(model, 200)
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
    some, others = family.make_inputs(padding=None), family.make_inputs(padding=None, images=(2, 1))
    with tokenprune.patched(model, "fastv", keep=0.4):
        want = [generate(model, one) for one in (some, others)]
        caches = [static(model, 90), static(model, 120)]
        tokens = [one.sequences[:, -STEPS:] for one in want]
        calls = list(zip((some, others), caches, strict=True))
        got = [model(**one, past_key_values=cache).logits[:, -1] for one, cache in calls]
        for step in range(STEPS):
            for index in (0, 1):
                close(got[index], want[index].logits[step])
                if step < STEPS - 1:
                    ids = tokens[index][:, step : step + 1]
                    got[index] = model(input_ids=ids, past_key_values=caches[index]).logits[:, -1]
        want = generate(model, some, num_beams=3)
        got = generate(model, some, num_beams=3, cache_implementation="static")
        assert torch.equal(got.sequences, want.sequences)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_decode_steps_compile(name: str, build) -> None:
    """Without a break; and no step, and no later call of the same length, is compiled anew, whatever
    another patched model did meanwhile."""
    dynamo = torch._dynamo
    family = FAMILIES[name]
    model, inputs = family.build(), family.make_inputs(padding=None)
    settings = CompileConfig(backend="eager", fullgraph=True)
    settings._compile_all_devices = True

    def graphs(calls: int) -> tuple[int, list[Any]]:
        dynamo.reset()
        dynamo.utils.counters.clear()
        call = partial(generate, model, inputs, cache_implementation="static", compile_config=settings)
        said = [call()]
        # What this thread knows of models' calls is another thing now: no step may look there.
        with tokenprune.patched(build(family), "uniform", keep=0.4):
            build(family)(**inputs)
            said += [call() for _ in range(calls - 1)]
        assert not dynamo.utils.counters["graph_break"]
        return dynamo.utils.counters["stats"]["unique_graphs"], said

    unpatched, _ = graphs(3)
    # Before the decoder; by the attention of a layer; by what its attention and MLP make of their inputs.
    for method in ("divprune", "fastv", "transprune") if name == "llava" else ("divprune", "fastv"):
        # Graphs are for prefill: a step is compiled as without them.
        graphed = method == "divprune"
        with tokenprune.patched(model, method, keep=0.6 if method == "transprune" else 0.4, graphs=graphed):
            want = generate(model, inputs)
            found, said = graphs(3)
        assert found == unpatched
        for one in said:
            check_same(one, want)
    dynamo.reset()


@torch.no_grad()
def test_what_is_refused(build) -> None:
    model, inputs = FAMILIES["llava"].prepare(build, padding=None)
    want = generate(model, inputs)
    with tokenprune.patched(model, "dyrate", keep=0.4), pytest.raises(UnsupportedSetupError, match="keeps its slots"):
        generate(model, inputs, cache_implementation="static")
    for name in {"qwen3_5", "gemma4", "llama4"} - REASONS.keys():
        other = SPECIAL[name]
        special = build(other)
        with tokenprune.patched(special, "divprune", keep=0.4), pytest.raises(UnsupportedSetupError, match="static"):
            special(**other.make_inputs(padding=None), past_key_values=static(special, 100))
    check_same(generate(model, inputs), want)
