# SPDX-License-Identifier: Apache-2.0
"""torch.compile of whole patched models: prefill and decoding give the answers of the same model uncompiled, because
hooks run outside of graphs. Steps with a static cache stay in one graph: see test_static_cache.py."""

from __future__ import annotations

import copy
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
from oracle import close
from zoo import FAMILIES, Family

PACKAGE = os.path.dirname(tokenprune.__file__) + os.sep  # not the checkout, whose environment may lie in it
CPU_COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
FASTV = ("fastv", {"layer": 1})
METHODS = {"divprune": [("divprune", {})], "fastv": [FASTV], "both": [("divprune", {}), FASTV], "tome": [("tome", {})]}


def shallow(family: Family) -> PreTrainedModel:
    """Return a model of two decoder layers, of which one comes after a cut, and of a tower as short."""
    config = copy.deepcopy(family.config)
    text, vision = config["text_config"], config["vision_config"]
    text["num_hidden_layers"] = 2
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:2]
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

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
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
    """Graphs made of the unpatched model serve no patched one, nor the other way round."""
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


@pytest.mark.skipif(CPU_COMPILER is None, reason="inductor writes C++, and no compiler is here")
@pytest.mark.skipif(" " in torch.__path__[0], reason="inductor does not quote torch's path, and it has a space")
@pytest.mark.skipif(os.environ.get("ATEN_CPU_CAPABILITY") == "default", reason="inductor's C++ wants AVX2")
def test_inductor_compiles_a_pruned_prefill() -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = shallow(family), family.make_inputs(rows=1)
    tokenprune.patch(model, methods("divprune"), keep=0.4)
    want = talk(model, inputs, steps=0)
    same(talk(in_place(model, "inductor"), inputs, steps=0), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
