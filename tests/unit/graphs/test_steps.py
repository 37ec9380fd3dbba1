# SPDX-License-Identifier: Apache-2.0
"""Decoding steps with graphs. Without a GPU the layers run again on the buffers, instead of a replay."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

import tokenprune
from lossless_cache import lossless
from oracle import close
from tokenprune import OptionError
from tokenprune.integrations.hf.cache.reduced_cache import Reduced
from tokenprune.integrations.hf.graphs import Graphs, graphed, warm_up
from tokenprune.integrations.hf.graphs.decoder import GraphedDecoder
from tokenprune.integrations.hf.graphs.walk import LEARNING_STEP
from zoo import FAMILIES

STEPS = 6


def generate(model: Any, inputs: Any, **options: Any) -> Any:
    defaults = dict(max_new_tokens=STEPS, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        return model.generate(**inputs, **defaults | options)


def same(got: Any, want: Any) -> None:
    """Compare tokens, logits, and the keys and values of each layer."""
    assert torch.equal(got.sequences, want.sequences)
    for logits, expected in zip(got.logits, want.logits, strict=True):
        close(logits, expected)
    same_cache(got.past_key_values, want.past_key_values)


def same_cache(got: Any, want: Any) -> None:
    for layer, expected in zip(got.layers, want.layers, strict=True):
        assert layer.keys.shape == expected.keys.shape and type(layer) is type(expected)
        assert getattr(layer, "cumulative_length", None) == getattr(expected, "cumulative_length", None)
        close(layer.keys, expected.keys)
        close(layer.values, expected.values)


def counts(model: Any) -> Any:
    return tokenprune.stats(model).graphs


def get_part(model: Any) -> GraphedDecoder:
    parts = tokenprune.api.get_attachment(model).engine.parts
    return next(part for part in parts if isinstance(part, GraphedDecoder))


def continue_turn(model: Any, first: Any, inputs: Any, new: Any = (5, 6, 7), **options: Any) -> Any:
    """Ask a second question on the cache of a first answer."""
    rows = len(inputs["input_ids"])
    added = torch.cat([first.sequences[:, inputs["input_ids"].shape[1] :], torch.tensor([list(new)] * rows)], 1)
    ids = torch.cat([inputs["input_ids"], added], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(added)], 1)
    return generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=first.past_key_values, **options)


# Methods that cut before the decoder, inside the decoder, and while decoding.
METHODS = ["divprune", "visionzip", "tome", "fastv", "dart", "pyramiddrop", "vscan", "vtw", "dyrate"]


@pytest.mark.parametrize("images", [(1,), (1, 2)])
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, images: tuple[int, ...], build: Any) -> None:
    """Rows of several lengths have masks, and cuts inside the decoder leave layers of several lengths."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=images, padding="left")
    with tokenprune.patched(model, method, keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, method, keep=0.4, graphs=Graphs(cache_step=32)):
        for _ in range(3):
            same(generate(model, inputs), want)
        found = counts(model)
    assert found.step_hits == 3 * (STEPS - 1) - 1 and found.step_misses == {LEARNING_STEP: 1}


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
    """Its masks are additive, and there is one in each step. The slots of padding differ from the prefill on."""
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 2), padding="left")
    with tokenprune.patched(model, "divprune", keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            got = generate(model, inputs)
            assert torch.equal(got.sequences, want.sequences)
            for logits, expected in zip(got.logits, want.logits, strict=True):
                close(logits, expected)
        assert counts(model).step_hits == 2 * (STEPS - 1) - 1


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
    """A cache that outgrows its buffers moves into larger ones, and an answer of any length is the same."""
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


@pytest.mark.parametrize("images", [(1,), (1, 2)])
@pytest.mark.parametrize("method", ["divprune", "fastv"])
def test_next_turns(method: str, images: tuple[int, ...], build: Any) -> None:
    """Several questions on kept caches, in turn: one conversation does not disturb another."""
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


def test_kept_tensors_do_not_change(build: Any) -> None:
    """Tensors of an earlier cache, which a caller keeps, are not written by later prompts and steps."""
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
        assert counts(model).captured <= captured + 1  # buffers that nothing shares are used again


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
    """Changes of a cache between steps, of which an earlier copy stays as it was."""
    if patched and change in ("rewind", "crop of some layers"):
        pytest.skip("the positions of a pruned cache are changed by crop only")
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(2, 2))

    def run() -> list[Any]:
        cache = generate(model, inputs).past_key_values
        before = [(layer.keys, layer.values) for layer in cache.layers]
        found = [branch(model, cache, 20), branch(model, cache, 21)]
        CHANGES[change](cache)
        found += [branch(model, cache, 22), branch(model, cache, 23)]
        for states in before if change != "in place" else []:
            found += [states[0].clone(), states[1].clone()]
        return [*found, *(layer.keys.clone() for layer in cache.layers)]

    keep = 0.4 if patched else 1.0
    with tokenprune.patched(model, "divprune", keep=keep):
        expected = run()
    with tokenprune.patched(model, "divprune", keep=keep, graphs=True):
        run()
        for got, want in zip(run(), expected, strict=True):
            close(got, want)
        assert counts(model).step_hits >= 2 * STEPS


class _Forbid:
    """A logits processor that forbids a token after each step."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, ids[0, -1:], -1e9)


class _Stop:
    """Stops at every fifth token."""

    calls = 0

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return torch.full((len(ids),), self.calls % 5 == 0)


class _Streamer:
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.clone())

    def end(self) -> None:
        self.tokens.append(torch.tensor([-1]))


OPTIONS: dict[str, dict[str, Any]] = {
    "beams": dict(num_beams=3, num_return_sequences=2),
    "sampling": dict(do_sample=True, num_return_sequences=3, temperature=0.7),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "logits processor": dict(logits_processor=LogitsProcessorList([_Forbid()])),
    "stopping criteria": dict(stopping_criteria=StoppingCriteriaList([_Stop()]), max_new_tokens=20),
    "guidance": dict(guidance_scale=1.5),
    "inference mode": {},
}


@pytest.mark.parametrize("method", ["divprune", "fastv"])
@pytest.mark.parametrize("option", OPTIONS)
def test_generate(option: str, method: str, build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))

    def run() -> Any:
        torch.manual_seed(0)
        with torch.inference_mode(option == "inference mode"):
            return generate(model, inputs, **OPTIONS[option])

    with tokenprune.patched(model, method, keep=0.4):
        want = run()
    with tokenprune.patched(model, method, keep=0.4, graphs=True):
        for _ in range(2):
            got = run()
            assert torch.equal(got.sequences, want.sequences)
            for logits, expected in zip(got.logits, want.logits, strict=True):
                close(logits, expected)
        assert counts(model).step_hits > 0 or option == "prompt lookup"


def test_streamers(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4):
        generate(model, inputs, streamer=(want := _Streamer()))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            generate(model, inputs, streamer=(got := _Streamer()))
            assert len(got.tokens) == STEPS + 2 and all(map(torch.equal, got.tokens, want.tokens))


def test_refused_caches(build: Any) -> None:
    """Steps with other caches run without graphs, and the reason is counted."""
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(images=(1,))
    config = model.config.get_text_config()

    class Offloaded(DynamicCache):
        offloading = property(lambda self: True, lambda self, value: None)

        def update(self, *args: Any, **kwargs: Any) -> Any:
            return self.layers[args[2]].update(*args[:2])

    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "": lambda: {"cache_implementation": "static"},  # transformers compiles its steps
        "the cache is a Cache": lambda: {"past_key_values": lossless(model)},
        "the cache is a Offloaded": lambda: {"past_key_values": Offloaded(config=config)},
    }
    for reason, build_options in cases.items():
        with tokenprune.patched(model, "divprune", keep=0.4):
            want = generate(model, inputs, **build_options())
        with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
            for _ in range(2):
                assert torch.equal(generate(model, inputs, **build_options()).sequences, want.sequences)
            found = counts(model)
        assert not found.step_hits and (not reason or reason in found.step_misses), found


def test_sliding_windows(build: Any) -> None:
    """Layers with a window are replayed while the window holds the whole buffer, and run without graphs after that."""
    family = FAMILIES["gemma3"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(images=(1,))
    text = model.config.get_text_config()
    assert "sliding_attention" in text.layer_types
    for window, hits in ((12, "some"), (400, "all")):
        text.sliding_window = window
        for layer in model.model.language_model.layers:
            if getattr(layer.self_attn, "sliding_window", None):
                layer.self_attn.sliding_window = window
        with tokenprune.patched(model, "divprune", keep=0.4):
            want = generate(model, inputs)
        with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(cache_step=16)):
            for _ in range(2):
                same(generate(model, inputs), want)
            moved = [("step", *key[0][1:2]) for key in get_part(model).buckets._buckets if key[0][0] == "step"]
        layers = {layer for _, group in moved for layer in group}
        sliding = {index for index, kind in enumerate(text.layer_types) if kind == "sliding_attention"}
        assert (layers >= sliding) == (hits == "all") and layers - sliding, (window, layers)


def test_adapters_and_hooks(build: Any) -> None:
    """Layers with modules of other packages run without graphs; they are captured anew after the modules are gone."""
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(images=(1,))
    layers = model.model.language_model.layers

    class LoRA(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.delta = base, nn.Linear(base.in_features, base.out_features, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.base(hidden) + self.delta(hidden)

    LoRA.__module__ = "peft.tuners.lora"
    plain = copy.deepcopy(model)
    tokenprune.patch(model, "divprune", keep=0.4, graphs=True)
    tokenprune.patch(plain, "divprune", keep=0.4)

    def compare() -> int:
        before = counts(model).step_hits
        for _ in range(2):
            same(generate(model, inputs), generate(plain, inputs))
        return counts(model).step_hits - before

    assert compare() == 2 * (STEPS - 1) - 1
    bases = [layer.mlp.up_proj for layer in layers]
    for layer, other in zip(layers, plain.model.language_model.layers, strict=True):
        layer.mlp.up_proj = LoRA(layer.mlp.up_proj)
        other.mlp.up_proj = copy.deepcopy(layer.mlp.up_proj)
    assert compare() == 0 and "no layer can use graphs" in counts(model).step_misses
    for layer, other, base in zip(layers, plain.model.language_model.layers, bases, strict=True):
        layer.mlp.up_proj, other.mlp.up_proj = base, other.mlp.up_proj.base
    assert compare() == 2 * (STEPS - 1) - 1
    with torch.no_grad():
        for both in (layers, plain.model.language_model.layers):
            both[1].mlp.up_proj.weight.mul_(0.5)
    assert compare() == 2 * (STEPS - 1)
    layers[2]._hf_hook = object()  # as of weights that accelerate moves
    assert compare() == 2 * (STEPS - 1) - 1
    del layers[2]._hf_hook


def test_gradients_and_outputs(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            cache = generate(model, inputs).past_key_values
        hits = counts(model).step_hits
        model(input_ids=torch.tensor([[20]]), past_key_values=cache, use_cache=True)
        assert any("gradients are on" in reason for reason in counts(model).step_misses)
        generate(model, inputs, output_hidden_states=True)
        assert any("hidden states" in reason for reason in counts(model).step_misses)
        assert counts(model).step_hits == hits


def test_bounds(build: Any) -> None:
    """Buffers count as memory, are refused beyond the limit, and are freed by unpatching."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(cache_step=64)):
        for _ in range(2):
            kept = generate(model, inputs)
        part, cache = get_part(model), kept.past_key_values
        step = next(bucket for key, bucket in part.buckets._buckets.items() if key[0][0] == "step")
        stored = sum(buffer.nbytes for pair in step.buffers.values() for buffer in pair)
        used = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert used < stored == used * 64 // cache.layers[0].keys.shape[2]
        assert counts(model).bytes >= stored
    assert len(part.buckets) == 0
    same(kept, want)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(bytes=1000)):
        for _ in range(2):
            same(generate(model, inputs), want)
        assert counts(model).step_hits == 0
        assert any("more than bytes=1000" in reason for reason in counts(model).step_misses)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(decode=False)):
        generate(model, inputs)
        assert not counts(model).step_hits and not counts(model).step_misses


def test_old_values(build: Any) -> None:
    """A cache with NaN leaves nothing to a shorter cache in the same buffers."""
    model = build(FAMILIES["llava"])
    decoder = model.model.language_model
    width = decoder.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    good = torch.randn(1, 20, width, generator=generator)
    bad = torch.full((1, 60, width), float("nan"))
    token = torch.randn(1, 1, width, generator=generator)

    def run(embeds: Tensor) -> Tensor:
        cache = DynamicCache(config=decoder.config)
        decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
        return decoder(inputs_embeds=token, past_key_values=cache, use_cache=True).last_hidden_state

    with torch.no_grad():
        want = run(good)
        with graphed(model):
            for embeds in (bad, bad, good):
                got = run(embeds)
    close(got, want)


def test_auto(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape is captured when it is used for the second time, within a share of the free memory."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, "divprune", keep=0.4, graphs="auto"):
        captured = []
        for _ in range(4):
            same(generate(model, inputs), want)
            captured.append(counts(model).captured)
        # Groups are recorded, shapes are counted, and the third prompt replays.
        assert captured[0] <= 1 and captured[-1] == captured[-2] == 2, captured
        reasons = {*counts(model).misses, *counts(model).step_misses}
        assert "a graph is captured when its shape is used 2 times" in reasons
        assert not tokenprune.stats(model).notes
        buckets = get_part(model).buckets
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
        device = SimpleNamespace(type="cuda")
        assert buckets._get_limit(device) == (10_000 + buckets.bytes) // 10
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
        assert buckets._get_limit(device) == 2 << 30
    for fields in ({"min_uses": 0}, {"free_share": 0.0}, {"free_share": 2}, {"decode": 1}, {"cache_step": 0}):
        with pytest.raises(OptionError, match="graphs: "):
            Graphs(**fields)


def test_warm_up(build: Any) -> None:
    """Captures the step too, so that the first answer replays."""
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=1.0, graphs=True):
        warm_up(model, [inputs["input_ids"].shape[1]])
        before = counts(model)
        generate(model, inputs)
        assert counts(model).captured == before.captured and counts(model).step_hits == before.step_hits + STEPS - 1


def test_threads(build: Any) -> None:
    """Caches of several threads have different buffers at the same time."""
    family = FAMILIES["llava"]
    model = build(family)
    prompts = [family.make_inputs(images=(1,), seed=seed) for seed in range(3)]
    with tokenprune.patched(model, "divprune", keep=0.4):
        expected = [generate(model, inputs) for inputs in prompts]
    answers: dict[int, list[Any]] = {}

    def ask(index: int) -> None:
        answers[index] = [generate(model, prompts[index]) for _ in range(3)]

    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        generate(model, prompts[0])
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts(model).step_hits == 10 * (STEPS - 1) - 1
    for index, want in enumerate(expected):
        for got in answers[index]:
            same(got, want)


def test_reduced_caches_stay_reduced(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            cache = generate(model, inputs).past_key_values
    assert isinstance(cache, Reduced)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + STEPS - 1
