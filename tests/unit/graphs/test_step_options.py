# SPDX-License-Identifier: Apache-2.0
"""Decoding steps with graphs: options of `generate`, unsupported caches, limits and threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessorList, StoppingCriteriaList

import tokenprune
from cached_runs import lossless
from graphed_answers import STEPS, counts, generate, get_part, same, same_logits
from oracle import close
from tokenprune import OptionError
from tokenprune.integrations.hf.cache.reduced_cache import Reduced
from tokenprune.integrations.hf.graphs import Graphs, graphed, warm_up
from zoo import FAMILIES


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
            same_logits(run(), want)
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
            graphs = counts(model)
        assert not graphs.step_hits and (not reason or reason in graphs.step_misses), graphs


def test_sliding_windows(build: Any) -> None:
    """Layers with a window are replayed only while the window covers the whole buffer."""
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
            groups = [("step", *key[0][1:2]) for key in get_part(model).buckets._buckets if key[0][0] == "step"]
        layers = {layer for _, group in groups for layer in group}
        sliding = {index for index, kind in enumerate(text.layer_types) if kind == "sliding_attention"}
        assert (layers >= sliding) == (hits == "all") and layers - sliding, (window, layers)


def test_adapters_and_hooks(build: Any) -> None:
    """Layers with modules of other packages run without graphs, and are captured again after removal."""
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
    layers[2]._hf_hook = object()  # as for weights that accelerate moves
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
    """NaN of an earlier cache does not leak into a shorter cache in the same buffers."""
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
    """A shape is captured on its second use, within a share of the free memory."""
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
    """The step is captured too, so the first answer replays."""
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
