# SPDX-License-Identifier: Apache-2.0
"""Models that are built once, and a watch over them: no test may leave one patched or otherwise changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

# Without a GPU, kernels run in Triton's interpreter. The first import of Triton settles that, and transformers does it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import PreTrainedModel

import tokenprune
from tokenprune import Budget, Site
from zoo import FAMILIES, IMAGE, VIDEO, Family

METHODS = tokenprune.available_methods()
# What acts on pixels needs a processor; these tests hand the model ready-made tensors. What acts in the encoder changes
# the features, so that an oracle with the unpatched encoder does not fit: see test_encoder.py.
_BEFORE_THE_DECODER = (Site.PRE_ENCODER, Site.IN_ENCODER)
# What acts on attention removes nothing, so there is no cut to look at: see test_pevlm.py.
_ELSEWHERE = (*_BEFORE_THE_DECODER, Site.ATTENTION)
MODEL_METHODS = [name for name in METHODS if tokenprune.method_info(name).site not in _ELSEWHERE]
# Methods that cut once and keep what they are asked for; the others spread their budget over several cuts.
SINGLE_CUT = [name for name in MODEL_METHODS if len(tokenprune.method(name).stages(Budget(keep=0.3), 4)) == 1]

_models: dict[tuple[str, str], PreTrainedModel] = {}
_pristine: dict[tuple[str, str], Any] = {}
_in_use: set[tuple[str, str]] = set()


def pytest_configure() -> None:
    torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many model types test_families.py found to work: those of which no test failed."""

    def types(outcome: str) -> set[str]:
        properties = [getattr(one, "user_properties", ()) for one in terminalreporter.stats.get(outcome, ())]
        return {value for of_test in properties for name, value in of_test if name == "model type"}

    if works := types("passed") - types("failed") - types("error"):
        terminalreporter.write_line(f"families: {len(works)} model types work: {', '.join(sorted(works))}")


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that a patch may touch: hooks, instance attributes and configs of all modules, weights left out."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if key in ("_parameters", "_buffers", "_modules"):
                value = sorted(value)
            elif isinstance(value, dict):  # hooks among them
                value = {k: id(v) for k, v in value.items()}
            elif hasattr(value, "to_dict"):
                value = (id(value), value.to_dict(), getattr(value, "_attn_implementation", None))
            elif not isinstance(value, (int, float, str, type(None))):
                value = id(value)
            seen[f"{name}.{key}"] = value
        seen[f"{name}.class"] = type(module)
    return seen


def check_takes(family: Family, method: str) -> None:
    """Skip the test if `method` refuses models of `family`."""
    if tokenprune.method_info(method).site is Site.ATTENTION and not family.video:
        pytest.skip(f"{family.name} takes no video, and {method} says so (test_pevlm.py)")


def pieces(family: Family, inputs: Any, per: str = "image") -> list[list[list[int]]]:
    """Per row the positions of each piece of picture that has a budget for itself."""
    rows = []
    for counts, ids in zip(inputs.counts, inputs["input_ids"], strict=True):
        places = ((ids == IMAGE) | (ids == VIDEO)).nonzero().flatten()
        if per == "prompt":
            counts = [len(places)] if len(places) else []
        rows.append([piece.tolist() for piece in places.split(counts)])
    return rows


@pytest.fixture
def kernel_device() -> Iterator[torch.device]:
    """Where kernels are tested: a GPU, or Triton's interpreter on CPU. Meanwhile torch.empty gives memory full of NaN
    (of the largest int), so that what a kernel forgets to write cannot pass by luck."""
    pytest.importorskip("triton", reason="Triton is not installed, so there is no kernel to test")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture
def build() -> Callable[..., PreTrainedModel]:
    """build(family, attn): a model that all tests share; an `attn` of the tests' own goes to the decoder alone."""

    def get(family: Family, attn: str = "sdpa") -> PreTrainedModel:
        key = (family.name, attn)
        if key not in _models:
            _models[key] = family.build(attn if attn in ("sdpa", "eager") else "sdpa")
            if attn not in ("sdpa", "eager"):
                _models[key].set_attn_implementation({"text_config": attn})
            # transformers installs hooks of its own on first use.
            _models[key](**family.make_inputs(), output_hidden_states=True)
            if family.video is not None:
                _models[key](**family.make_inputs(images=(0, 0), video=True), output_hidden_states=True)
            _pristine[key] = snapshot(_models[key])
        _in_use.add(key)
        return _models[key]

    return get


@pytest.fixture
def model(family: Family, build: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build(family)


@pytest.fixture(autouse=True)
def models_stay_as_they_were() -> Iterator[None]:
    _in_use.clear()
    yield
    left = []
    for key in sorted(_in_use):
        model = _models[key]
        # rope_deltas is where Qwen's base model remembers its last prompt.
        now = {k: v for k, v in snapshot(model).items() if not k.endswith(".rope_deltas")}
        before = {k: v for k, v in _pristine[key].items() if not k.endswith(".rope_deltas")}
        if now != before:
            del _models[key]  # one failure, not one per later test
            left.append((key, [k for k in now.keys() | before.keys() if now.get(k) != before.get(k)][:4]))
    assert not left, f"a test left its model changed: {left}"
