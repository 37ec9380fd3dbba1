# SPDX-License-Identifier: Apache-2.0
"""torch.compile of patched models: prefill and decoding give the answers of the same model uncompiled, because hooks
run outside of graphs; and into how many graphs a prefill falls. Steps with a static cache stay in one: see
test_static_cache.py."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import tokenprune
from basics import METHODS as ALL
from basics import check_takes, snapshot
from oracle import close
from zoo import FAMILIES, Family

PACKAGE = os.path.dirname(tokenprune.__file__) + os.sep  # not the checkout, whose environment may lie in it
CPU_COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
FASTV = ("fastv", {"layer": 1})
METHODS = {"divprune": [("divprune", {})], "fastv": [FASTV], "both": [("divprune", {}), FASTV], "tome": [("tome", {})]}


def shallow(family: Family, layers: int = 2) -> PreTrainedModel:
    """Return a model of two decoder layers, of which one comes after a cut, and of a tower as short."""
    config = copy.deepcopy(family.config)
    text, vision = config["text_config"], config["vision_config"]
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    if "num_hidden_layers" in vision:
        vision["num_hidden_layers"] = 2
    return replace(family, config=config).build()


def methods(name: str) -> list[Any]:
    return [tokenprune.method(method, **options) for method, options in METHODS[name]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled stays for other tests. Graphs of layers number more than torch likes, and it says so."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    logger.setLevel(level)


@torch.no_grad()
def talk(model: nn.Module, inputs: Any, steps: int = 1) -> list[Tensor]:
    """Logits of a prefill, and of steps after it."""
    out = model(**inputs)
    said = [out.logits]
    for _ in range(steps):
        token = said[-1][:, -1:].argmax(-1)
        said.append(model(input_ids=token, past_key_values=out.past_key_values).logits)
    return said


class Graphs:
    """A backend that runs graphs as they are, and knows which lines their operations come from."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.number = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.number += 1
        traces = [node.stack_trace for node in graph.graph.nodes if node.stack_trace]
        self.lines += [trace[trace.rindex("File ") :] for trace in traces if "File " in trace]
        return graph.forward


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        close(one, other)


Backend = str | Graphs


def wrapped(model: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def its_forward(model: nn.Module, backend: Backend) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def its_layers(model: nn.Module, backend: Backend) -> nn.Module:
    for layer in model.model.language_model.layers:
        layer.compile(backend=backend)
    return model


WAYS = {"wrapped": wrapped, "in place": in_place, "its forward": its_forward, "its layers": its_layers}
# Every family, method and way at least once; the quickest always.
CASES = [
    ("llava", "divprune", "wrapped"),
    ("llava", "fastv", "its layers"),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in [
            ("llava", "tome", "in place"),
            ("qwen2_5_vl", "tome", "wrapped"),
            ("qwen2_5_vl", "both", "its forward"),
            *((name, "both", "in place") for name in FAMILIES if name not in ("llava", "qwen2_5_vl")),
        ]
    ),
]


@pytest.mark.parametrize(("name", "method", "way"), CASES)
def test_answers_are_those_of_the_model_uncompiled(name: str, method: str, way: str) -> None:
    family = FAMILIES[name]
    model, inputs = shallow(family), family.make_inputs(padding=None)
    tokenprune.patch(model, methods(method), keep=0.4)
    want, before = talk(model, inputs), tokenprune.stats(model)
    graphs = Graphs()
    same(talk(WAYS[way](model, graphs), inputs), want)
    assert any("transformers" in line for line in graphs.lines), "nothing was compiled"
    ours = [line for line in graphs.lines if PACKAGE in line and "/hf/cache/" not in line]
    assert not ours, f"choosing tokens ended up in a graph: {ours[:3]}"
    after = tokenprune.stats(model)
    assert after.visual_tokens_per_layer == before.visual_tokens_per_layer
    assert after.visual_tokens_out < after.visual_tokens_in and after.kv_bytes == before.kv_bytes


def test_patched_after_compiling_and_unpatched() -> None:
    family = FAMILIES["llava"]
    model, inputs = shallow(family), family.make_inputs(padding=None)
    plain = talk(model, inputs, steps=0)
    with tokenprune.patched(model, methods("both"), keep=0.4):
        pruned = talk(model, inputs, steps=0)
    assert not torch.allclose(plain[0][:, -1], pruned[0][:, -1])
    compiled = torch.compile(model, backend="eager")
    same(talk(compiled, inputs, steps=0), plain)
    tokenprune.patch(compiled, methods("both"), keep=0.4)
    same(talk(compiled, inputs, steps=0), pruned)
    tokenprune.unpatch(compiled)
    same(talk(compiled, inputs, steps=0), plain)
    tokenprune.patch(model, methods("both"), keep=0.4)  # of the model in it
    same(talk(compiled, inputs, steps=0), pruned)


def decoder(model: nn.Module, backend: Backend, **options: Any) -> None:
    inner = model.model.language_model
    inner.forward = torch.compile(inner.forward, backend=backend, **options)


def each_layer(model: nn.Module, backend: Backend) -> None:
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this version of torch takes what it compiled of one layer for the next")
    for layer in model.model.language_model.layers:
        layer.compile(backend=backend, isolate_recompiles=True)


LAYERS = 3
# The layer before a cut whose attention is read falls into 5: its norm, what leads to attention and from it, attention
# itself, and the MLP. Rows have one image and two.
OBSERVED = LAYERS + 4
COUNTS = [
    ("llava", "divprune", "left", decoder, 1),
    ("qwen2_5_vl", "dart", "left", each_layer, OBSERVED),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in [
            ("llava", "uniform", None, decoder, 1),
            ("llava", "fastv", None, each_layer, OBSERVED),
            ("qwen2_5_vl", "pool", None, decoder, 1),
            ("qwen2_5_vl", "both", None, each_layer, OBSERVED),
        ]
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "method", "padding", "compiled", "number"), COUNTS)
def test_graphs_of_a_prefill(name: str, method: str, padding: str | None, compiled: Any, number: int) -> None:
    """As many as the table says, for the first prompt of a length; none for later ones, of other content, whatever
    another patched model did meanwhile."""
    family = FAMILIES[name]
    model = shallow(family, LAYERS)
    prompts = [family.make_inputs(padding=padding, images=(1, 2), seed=seed) for seed in range(3)]
    plain, before = model(**prompts[0]).logits, snapshot(model)
    before.pop("model.rope_deltas", None)  # of the last prompt
    tokenprune.patch(model, methods(method) if method in METHODS else method, keep=0.4, record=True)
    want = [(model(**inputs).logits, tokenprune.stats(model).cuts) for inputs in prompts]
    assert want[0][1][-1].kept != want[1][1][-1].kept or method in ("pool", "uniform")
    graphs = Graphs()
    compiled(model, graphs)
    for inputs, (logits, cuts) in zip(prompts, want, strict=True):
        close(model(**inputs).logits, logits)
        assert [cut.kept for cut in tokenprune.stats(model).cuts] == [cut.kept for cut in cuts]
        assert graphs.number == number
        other = shallow(family)
        with tokenprune.patched(other, "uniform", keep=0.4):
            other(**inputs)
    tokenprune.unpatch(model)
    close(model(**prompts[0]).logits, plain)
    inner = model.model.language_model
    for module, own in ((inner, "forward"), *((layer, "_compiled_call_impl") for layer in inner.layers)):
        vars(module).pop(own, None)  # what compiling left
    after = snapshot(model)
    after.pop("model.rope_deltas", None)
    assert after == before


@torch.no_grad()
def test_fullgraph() -> None:
    """Holds for the forward of a decoder before which tokens are cut; hooks of the choice cannot be in a graph."""
    family = FAMILIES["llava"]
    inputs = family.make_inputs()
    for method, raises in (("divprune", False), ("fastv", True)):
        model = tokenprune.patch(shallow(family), methods(method), keep=0.4)
        want = model(**inputs).logits
        decoder(model, "eager", fullgraph=True)
        if raises:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="tokenprune chooses tokens outside of graphs"):
                model(**inputs)
        else:
            close(model(**inputs).logits, want)
        model = tokenprune.patch(shallow(family), methods(method), keep=0.4)
        model.compile(backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="tokenprune"):
            model(**inputs)


CAPTURABLE = [name for name in ALL if tokenprune.method_info(name).capturable]


@torch.no_grad()
@pytest.mark.parametrize("method", CAPTURABLE)
def test_one_length_leaves_one_width(method: str, build) -> None:
    """Of methods that a graph may hold: prompts of one length are as long in each layer, whatever they show."""
    family = FAMILIES["qwen2_5_vl"]
    check_takes(family, method)
    model = build(family)
    prompts = [family.make_inputs(images=(0, 0), video=(5, 4), seed=seed) for seed in range(3)]
    widths = []
    with tokenprune.patched(model, method, keep=0.4):
        for inputs in prompts:
            model(**inputs)
            widths.append(tokenprune.stats(model).width_per_layer)
    assert widths[0] == widths[1] == widths[2]
    assert min(widths[0]) < prompts[0]["input_ids"].shape[1]


@pytest.mark.skipif(CPU_COMPILER is None, reason="inductor writes C++, and no compiler is here")
@pytest.mark.skipif(" " in torch.__path__[0], reason="inductor does not quote torch's path, and it has a space")
@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") == "default", reason="inductor's C++ wants AVX2")
def test_inductor_compiles_a_pruned_prefill() -> None:
    """The decoder, which is one graph: a tower is compiled as it is without a patch."""
    family = FAMILIES["llava"]
    model, inputs = shallow(family, 1), family.make_inputs(rows=1)
    tokenprune.patch(model, methods("divprune"), keep=0.4)
    want = talk(model, inputs, steps=0)
    decoder(model, "inductor")
    same(talk(model, inputs, steps=0), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
