# SPDX-License-Identifier: Apache-2.0
"""torch.compile of patched models: answers equal the uncompiled model, and the number of graphs is fixed.

Hooks run outside of graphs. For steps with a static cache, see test_static_cache.py.
"""

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

PACKAGE = os.path.dirname(tokenprune.__file__) + os.sep  # not the checkout, which may contain the environment
CPU_COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
FASTV = ("fastv", {"layer": 1})
METHODS = {"divprune": [("divprune", {})], "fastv": [FASTV], "both": [("divprune", {}), FASTV], "tome": [("tome", {})]}


def build_shallow(family: Family, layers: int = 2) -> PreTrainedModel:
    """Build a model with `layers` decoder layers and a tower of two blocks."""
    config = copy.deepcopy(family.config)
    text, vision = config["text_config"], config["vision_config"]
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    if "num_hidden_layers" in vision:
        vision["num_hidden_layers"] = 2
    return replace(family, config=config).build()


def make_methods(name: str) -> list[Any]:
    return [tokenprune.method(method, **options) for method, options in METHODS[name]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Reset the compiler around each test, and hide warnings about the number of graphs."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    logger.setLevel(level)


@torch.no_grad()
def run_steps(model: nn.Module, inputs: Any, steps: int = 1) -> list[Tensor]:
    """Return the logits of a prefill and of the steps after it."""
    out = model(**inputs)
    logits = [out.logits]
    for _ in range(steps):
        token = logits[-1][:, -1:].argmax(-1)
        logits.append(model(input_ids=token, past_key_values=out.past_key_values).logits)
    return logits


class Graphs:
    """A backend that runs graphs eagerly and records the source lines of their operations."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.count += 1
        traces = [node.stack_trace for node in graph.graph.nodes if node.stack_trace]
        self.lines += [trace[trace.rindex("File ") :] for trace in traces if "File " in trace]
        return graph.forward


def check_close(got: list[Tensor], want: list[Tensor]) -> None:
    for actual, expected in zip(got, want, strict=True):
        close(actual, expected)


Backend = str | Graphs


def compile_model(model: nn.Module, backend: Backend) -> nn.Module:
    return torch.compile(model, backend=backend)


def compile_in_place(model: nn.Module, backend: Backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def compile_forward(model: nn.Module, backend: Backend) -> nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def compile_layers(model: nn.Module, backend: Backend) -> nn.Module:
    for layer in model.model.language_model.layers:
        layer.compile(backend=backend)
    return model


WAYS = {
    "wrapped": compile_model,
    "in place": compile_in_place,
    "its forward": compile_forward,
    "its layers": compile_layers,
}
# Every family, method and way at least once. The fastest cases always run.
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
    model, inputs = build_shallow(family), family.make_inputs(padding=None)
    tokenprune.patch(model, make_methods(method), keep=0.4)
    want, before = run_steps(model, inputs), tokenprune.stats(model)
    graphs = Graphs()
    check_close(run_steps(WAYS[way](model, graphs), inputs), want)
    assert any("transformers" in line for line in graphs.lines), "no graph was compiled"
    selection_lines = [line for line in graphs.lines if PACKAGE in line and "/hf/cache/" not in line]
    assert not selection_lines, f"a graph contains the selection: {selection_lines[:3]}"
    after = tokenprune.stats(model)
    assert after.visual_tokens_per_layer == before.visual_tokens_per_layer
    assert after.visual_tokens_out < after.visual_tokens_in and after.kv_bytes == before.kv_bytes


def test_patched_after_compiling_and_unpatched() -> None:
    family = FAMILIES["llava"]
    model, inputs = build_shallow(family), family.make_inputs(padding=None)
    plain = run_steps(model, inputs, steps=0)
    with tokenprune.patched(model, make_methods("both"), keep=0.4):
        pruned = run_steps(model, inputs, steps=0)
    assert not torch.allclose(plain[0][:, -1], pruned[0][:, -1])
    compiled = torch.compile(model, backend="eager")
    check_close(run_steps(compiled, inputs, steps=0), plain)
    tokenprune.patch(compiled, make_methods("both"), keep=0.4)
    check_close(run_steps(compiled, inputs, steps=0), pruned)
    tokenprune.unpatch(compiled)
    check_close(run_steps(compiled, inputs, steps=0), plain)
    tokenprune.patch(model, make_methods("both"), keep=0.4)  # the compiled model wraps this model
    check_close(run_steps(compiled, inputs, steps=0), pruned)


def compile_decoder(model: nn.Module, backend: Backend, **options: Any) -> None:
    inner = model.model.language_model
    inner.forward = torch.compile(inner.forward, backend=backend, **options)


def isolate_layers(model: nn.Module, backend: Backend) -> None:
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        pytest.skip("this version of torch reuses the compiled code of one layer for the next")
    for layer in model.model.language_model.layers:
        layer.compile(backend=backend, isolate_recompiles=True)


LAYERS = 3
# An observed layer before a cut has 5 graphs: norm, input of attention, attention, output of attention, MLP. Rows
# have one and two images.
OBSERVED = LAYERS + 4
COUNTS = [
    ("llava", "divprune", "left", compile_decoder, 1),
    ("qwen2_5_vl", "dart", "left", isolate_layers, OBSERVED),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in [
            ("llava", "uniform", None, compile_decoder, 1),
            ("llava", "fastv", None, isolate_layers, OBSERVED),
            ("qwen2_5_vl", "pool", None, compile_decoder, 1),
            ("qwen2_5_vl", "both", None, isolate_layers, OBSERVED),
        ]
    ),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "method", "padding", "compiled", "num_graphs"), COUNTS)
def test_graphs_of_a_prefill(name: str, method: str, padding: str | None, compiled: Any, num_graphs: int) -> None:
    """The first prompt compiles the expected number of graphs; later prompts and other models compile no more."""
    family = FAMILIES[name]
    model = build_shallow(family, LAYERS)
    prompts = [family.make_inputs(padding=padding, images=(1, 2), seed=seed) for seed in range(3)]
    plain, before = model(**prompts[0]).logits, snapshot(model)
    before.pop("model.rope_deltas", None)  # belongs to the last prompt
    tokenprune.patch(model, make_methods(method) if method in METHODS else method, keep=0.4, record=True)
    want = [(model(**inputs).logits, tokenprune.stats(model).cuts) for inputs in prompts]
    assert want[0][1][-1].kept != want[1][1][-1].kept or method in ("pool", "uniform")
    graphs = Graphs()
    compiled(model, graphs)
    for inputs, (logits, cuts) in zip(prompts, want, strict=True):
        close(model(**inputs).logits, logits)
        assert [cut.kept for cut in tokenprune.stats(model).cuts] == [cut.kept for cut in cuts]
        assert graphs.count == num_graphs
        other = build_shallow(family)
        with tokenprune.patched(other, "uniform", keep=0.4):
            other(**inputs)
    tokenprune.unpatch(model)
    close(model(**prompts[0]).logits, plain)
    inner = model.model.language_model
    for module, attribute in ((inner, "forward"), *((layer, "_compiled_call_impl") for layer in inner.layers)):
        vars(module).pop(attribute, None)  # remove the compiled functions
    after = snapshot(model)
    after.pop("model.rope_deltas", None)
    assert after == before


@torch.no_grad()
def test_fullgraph() -> None:
    """The decoder compiles with fullgraph=True if tokens are dropped before it; a selection breaks the graph."""
    family = FAMILIES["llava"]
    inputs = family.make_inputs()
    for method, raises in (("divprune", False), ("fastv", True)):
        model = tokenprune.patch(build_shallow(family), make_methods(method), keep=0.4)
        want = model(**inputs).logits
        compile_decoder(model, "eager", fullgraph=True)
        if raises:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="tokenprune chooses tokens outside of graphs"):
                model(**inputs)
        else:
            close(model(**inputs).logits, want)
        model = tokenprune.patch(build_shallow(family), make_methods(method), keep=0.4)
        model.compile(backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="tokenprune"):
            model(**inputs)


CAPTURABLE = [name for name in ALL if tokenprune.method_info(name).capturable]


@torch.no_grad()
@pytest.mark.parametrize("method", CAPTURABLE)
def test_one_length_leaves_one_width(method: str, build) -> None:
    """Capturable methods give prompts of one length the same width in each layer."""
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


@pytest.mark.skipif(CPU_COMPILER is None, reason="inductor needs a C++ compiler")
@pytest.mark.skipif(" " in torch.__path__[0], reason="inductor does not quote torch's path, and it has a space")
@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") == "default", reason="inductor's C++ needs AVX2")
def test_inductor_compiles_a_pruned_prefill() -> None:
    """The decoder is one graph; a patch does not change how a tower compiles."""
    family = FAMILIES["llava"]
    model, inputs = build_shallow(family, 1), family.make_inputs(rows=1)
    tokenprune.patch(model, make_methods("divprune"), keep=0.4)
    want = run_steps(model, inputs, steps=0)
    compile_decoder(model, "inductor")
    check_close(run_steps(model, inputs, steps=0), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "no graph was compiled"
