# SPDX-License-Identifier: Apache-2.0
"""Graphed prefill. Without a GPU the layers of a bucket run again, instead of a replay."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphed_answers
import tokenprune
from graphed_answers import continue_turn, counts, get_part, same, same_logits
from oracle import close
from tokenprune import NotPatchedError, OptionError
from tokenprune.integrations.hf.graphs import Graphs, graphed, warm_up
from tokenprune.integrations.hf.graphs.walk import LEARNING
from zoo import FAMILIES

generate = partial(graphed_answers.generate, max_new_tokens=3)


@pytest.mark.parametrize("keep", [0.4, 1.0])
def test_families(family: Any, model: Any, keep: float) -> None:
    """Each family gives the same answer with graphs, and two of three prefills are replayed."""
    inputs = family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=keep):
        want = generate(model, inputs)
    with tokenprune.patched(model, "divprune", keep=keep, graphs=True):
        for _ in range(3):
            same(generate(model, inputs), want)
        graphs, notes = counts(model), tokenprune.stats(model).notes
    assert graphs.hits == 2 and graphs.misses == {LEARNING: 1} and graphs.bytes > 0 and not notes


@pytest.mark.parametrize("method", ["fastv", "dart", "v2drop", "vscan", "tome", "dyrate", "vtw"])
def test_methods(method: str, build: Any) -> None:
    """Layers that are observed or cut run without graphs, and the other layers in groups."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, method, keep=0.4):
        want = generate(model, inputs)
    with tokenprune.patched(model, method, keep=0.4, graphs=True):
        for _ in range(3):
            got = generate(model, inputs)
        same(got, want)
        assert (counts(model).hits == 2) == (method != "v2drop")  # v2drop reads all four layers


def test_rows(build: Any) -> None:
    """Rows of one length run without a mask. For ragged rows and padding the graph contains a mask."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    even = {name: torch.cat([value, value]) for name, value in inputs.items()}
    ragged = [
        family.make_inputs(images=images, padding=side) for images in ((1, 3), (1, 2)) for side in ("left", "right")
    ]
    with tokenprune.patched(model, "divprune", keep=0.4):
        want, *ragged_want = (generate(model, inputs) for inputs in (even, *ragged))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(step=256, decode=False)):
        for _ in range(2):
            same(generate(model, even), want)
        for inputs, expected in zip(ragged, ragged_want, strict=True):  # a shorter prompt follows a longer one
            same(generate(model, inputs), expected)
        assert counts(model).hits == 5 and counts(model).captured == 2


@pytest.mark.parametrize("method", ["fastv", "dart", "vscan", "dyrate"])
@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_rows_after_each_other(name: str, method: str, build: Any) -> None:
    """Prompts with and without masks alternate, with one row and several; cuts leave ragged rows."""
    family = FAMILIES[name]
    model = build(family)
    prompts = [family.make_inputs(images=images, padding="left") for images in ((1,), (1, 2), (2, 2), (1,), (1, 2))]
    with tokenprune.patched(model, method, keep=0.4):
        expected = [generate(model, inputs) for inputs in prompts]
    with tokenprune.patched(model, method, keep=0.4, graphs=True):
        for inputs, want in zip((*prompts, *prompts[::-1]), (*expected, *expected[::-1]), strict=True):
            same(generate(model, inputs), want)
        assert counts(model).hits >= 8, counts(model)


@pytest.mark.parametrize("length", [2, 63, 64, 65, 128])
def test_lengths(length: int, build: Any) -> None:
    """Lengths at the borders of buckets, and above max_tokens."""
    model = build(FAMILIES["llava"])
    ids = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    want = generate(model, inputs)
    with tokenprune.patched(model, "divprune", graphs=Graphs(max_tokens=100)):
        for _ in range(2):
            same(generate(model, inputs), want)
        graphs = counts(model)
    is_long = f"{length} tokens are more than max_tokens=100" in graphs.misses
    assert graphs.hits == (length <= 100) and is_long == (length > 100)


@pytest.mark.parametrize("images", [(1,), (1, 1)])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_next_turn(name: str, images: tuple[int, ...], build: Any) -> None:
    """A second question on a cache of the first, with left padding for two rows."""
    family = FAMILIES[name]
    model, inputs = build(family), family.make_inputs(images=images, padding="left")

    def talk() -> Any:
        return continue_turn(model, generate(model, inputs), inputs, max_new_tokens=3)

    with tokenprune.patched(model, "divprune", keep=0.4):
        want = talk()
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        talk()
        same(talk(), want)
        assert counts(model).hits == 1 and counts(model).misses["the cache holds tokens already"] >= 1


def test_stale(build: Any) -> None:
    """Overwritten weights keep the graph; replaced weights, replaced modules and new hooks need another capture."""
    family = FAMILIES["llava"]
    model, inputs = copy.deepcopy(build(family)), family.make_inputs(images=(1,))
    layers = model.model.language_model.layers
    tokenprune.patch(model, "divprune", keep=0.4, graphs=Graphs(decode=False))

    def compare(captured: int) -> None:
        for _ in range(2):
            got = generate(model, inputs)
        assert counts(model).captured == captured
        tokenprune.unpatch(plain := copy.deepcopy(model))
        with tokenprune.patched(plain, "divprune", keep=0.4):
            same(got, generate(plain, inputs))

    compare(1)
    with torch.no_grad():
        layers[1].mlp.up_proj.weight.mul_(0.5)
    compare(1)
    layers[1].mlp.up_proj.weight = nn.Parameter(layers[1].mlp.up_proj.weight * 3)
    compare(2)
    layers[2].mlp = copy.deepcopy(layers[0].mlp)
    compare(3)
    outputs: list[Tensor] = []
    layers[2].register_forward_hook(lambda module, args, output: outputs.append(output))
    compare(5)  # the layers before the hook, and the layers after it
    assert len(outputs) == 2 * 3 + 3


def test_values_of_an_earlier_prompt(build: Any) -> None:
    """NaN of an earlier prompt does not leak into a shorter prompt."""
    model = build(FAMILIES["llava"])
    decoder = model.model.language_model
    bad = torch.full((1, 60, decoder.config.hidden_size), float("nan"))
    good = torch.randn(1, 20, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = decoder(inputs_embeds=good, use_cache=True).last_hidden_state
        with graphed(model):
            for embeds in (bad, bad, good):
                got = decoder(inputs_embeds=embeds, use_cache=True).last_hidden_state
    close(got, want)


def test_masks_of_an_earlier_prompt(build: Any) -> None:
    """A bidirectional mask does not leak into a shorter prompt."""
    model = build(FAMILIES["llava"])
    decoder = model.model.language_model
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randn(1, length, decoder.config.hidden_size, generator=generator) for length in (60, 60, 20)]

    def run(embeds: Tensor) -> Tensor:
        mask = torch.ones(1, 1, embeds.shape[1], embeds.shape[1], dtype=torch.bool)
        return decoder(inputs_embeds=embeds, attention_mask=mask, use_cache=True).last_hidden_state

    with torch.no_grad():
        expected = [run(embeds) for embeds in prompts]
        with graphed(model):
            for embeds, want in zip(prompts, expected, strict=True):
                close(run(embeds), want)


def test_bounds(build: Any) -> None:
    """The least recently used graph is evicted, by count and by bytes; unpatching frees all graphs."""
    model = build(FAMILIES["llava"])
    tokenprune.patch(model, "divprune", graphs=Graphs(step=16, max_graphs=2, decode=False))
    part = get_part(model)
    try:
        warm_up(model, [10, 30, 10, 50])
        assert counts(model).captured == 3 and len(part.buckets) == 2
        warm_up(model, [10])
        assert counts(model).captured == 3  # the graph for 30 remains
        part.buckets.graphs = Graphs(step=16, decode=False, bytes=part.buckets.bytes)
        warm_up(model, [50, 70])
        assert len(part.buckets) == 1  # the graphs for 50 and 10 were evicted
        part.buckets.graphs = Graphs(step=16, decode=False, bytes=1)
        warm_up(model, [90, 90])
        assert any("bytes is more than bytes=1" in reason for reason in counts(model).misses)
    finally:
        tokenprune.unpatch(model)
    assert len(part.buckets) == 0 and not any("forward" in vars(layer) for layer in part.decoder.layers)


def test_warm_up(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=1.0, graphs=Graphs(decode=False)):
        warm_up(model, [inputs["input_ids"].shape[1], 100])
        assert counts(model).captured == 2
        for _ in range(2):
            generate(model, inputs)
        assert counts(model).captured == 2


def test_threads(build: Any) -> None:
    """Threads share graphs and get correct answers."""
    family = FAMILIES["llava"]
    model = build(family)
    prompts = [family.make_inputs(images=(1,), seed=seed) for seed in range(4)]
    with tokenprune.patched(model, "divprune", keep=0.4):
        expected = [generate(model, inputs) for inputs in prompts]
    answers: dict[int, list[Any]] = {}

    def ask(index: int) -> None:
        answers[index] = [generate(model, prompts[index]) for _ in range(4)]

    with tokenprune.patched(model, "divprune", keep=0.4, graphs=Graphs(decode=False)):
        generate(model, prompts[0])
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts(model).hits == 16 and counts(model).captured == 1
    for index, want in enumerate(expected):
        for got in answers[index]:
            same(got, want)


def test_gradients_and_training(build: Any) -> None:
    """Calls with gradients run without graphs; graphs captured in inference mode also serve other calls."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        with torch.inference_mode():
            for _ in range(2):
                model(**inputs)
        generate(model, inputs)
        assert counts(model).hits == 2
        model(**inputs).logits.sum().backward()
        model.zero_grad()
        assert counts(model).hits == 2 and any("gradients are on" in reason for reason in counts(model).misses)
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        assert len(hidden) > 2 and counts(model).hits == 2


def test_copies(build: Any) -> None:
    """A copy of a patched model captures graphs of its weights."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        for _ in range(2):
            want = generate(model, inputs)
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.language_model.layers[0].mlp.up_proj.weight.mul_(3)
        assert counts(other).hits == 1 and len(tokenprune.api.get_attachment(other).engine.parts[0].__dict__) > 0
        changed = [generate(other, inputs) for _ in range(2)][-1]
        assert not torch.equal(changed.logits[0], want.logits[0])
        same(generate(model, inputs), want)


def test_without_a_patch(build: Any) -> None:
    """The baseline for comparisons is the unpatched model with graphs."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    want = generate(model, inputs)
    with graphed(model):
        for _ in range(2):
            same(generate(model, inputs), want)
    with graphed(model, False):
        assert torch.equal(generate(model, inputs).logits[0], want.logits[0])


def test_encoded_images(build: Any) -> None:
    """Features that were encoded before are passed to the layers by some versions of transformers."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with torch.no_grad():
        encoded = model.model.get_image_features(inputs.pop("pixel_values"), return_dict=True)
        run = partial(model, **inputs, mm_encoder_outputs={"image": encoded})
        want = run().logits
        with tokenprune.patched(model, "divprune", keep=1.0, graphs=True):
            for _ in range(2):
                close(run().logits, want)
            assert counts(model).hits == 1


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3"])
def test_static_cache(name: str, build: Any) -> None:
    """The mask covers all slots. The graph contains it only if it hides more than later tokens."""
    family = FAMILIES[name]
    model = copy.deepcopy(build(family))  # transformers stores the longest cache on the model
    inputs = family.make_inputs(images=(1,))
    ragged = family.make_inputs(images=(1, 2), padding="left")

    def ask(inputs: Any) -> Any:
        return generate(model, inputs, cache_implementation="static")

    for method in ("divprune", "fastv"):
        with tokenprune.patched(model, method, keep=0.4):
            want, ragged_want = ask(inputs), ask(ragged)
        with tokenprune.patched(model, method, keep=0.4, graphs=True):
            for _ in range(2):
                got = ask(inputs)
            same_logits(got, want)
            close(ask(ragged).logits[0], ragged_want.logits[0])
            assert counts(model).hits == 2


def test_changed_hidden_states_between_layers_raise(build: Any) -> None:
    """A change of the hidden states between two graphed layers raises an error."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(images=(1,))
    with tokenprune.patched(model, "divprune", keep=0.4, graphs=True):
        generate(model, inputs)
        part = get_part(model)
        layer = part.decoder.layers[1]
        forward = layer.forward
        layer.forward = lambda hidden, **kwargs: forward(hidden + 1, **kwargs)
        try:
            part.known._snapshot = part.known._take_snapshot()  # hide the change
            with pytest.raises(tokenprune.TokenPruneError, match="layer 1 differs from the output of layer 0"):
                generate(model, inputs)
        finally:
            layer.forward = forward


def test_refusals(build: Any) -> None:
    model = build(FAMILIES["llava"])
    for wrong in ("yes", 1, Graphs):
        with pytest.raises(OptionError, match='must be True, False, "auto" or a'):
            tokenprune.patch(model, graphs=wrong)
    too_short = {"step": 64, "max_tokens": 32}
    for fields in ({"step": 0}, {"max_tokens": 1.5}, too_short, {"max_graphs": True}, {"static": 1}):
        with pytest.raises(OptionError, match="graphs: "):
            Graphs(**fields)
    with tokenprune.patched(model, "divprune"), pytest.raises(NotPatchedError, match="Pass graphs=True"):
        warm_up(model, [64])
    with tokenprune.patched(model, "divprune", graphs=True):
        for lengths, batch in (([], 1), ([1], 1), ([64], 0)):
            with pytest.raises(OptionError, match="lengths of at least 2 tokens"):
                warm_up(model, lengths, batch=batch)
    assert not tokenprune.is_patched(model)
