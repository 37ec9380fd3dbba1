# SPDX-License-Identifier: Apache-2.0
"""A process's default device and dtype decide nothing: the library names both wherever it makes a tensor, and what is
made of pixels, of a stream or in a session is the same. All methods are in
tests/unit/methods/test_defaults_of_the_process.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import tokenprune
from each import each
from process_defaults import DEFAULTS, defaulting
from processors import asked, demo_model, llava, photo
from session_oracle import collated, images_of
from tokenprune.testing import check_method
from zoo import FAMILIES

MAKERS = {one.__name__ for one in _device_constructors()} | {"Generator"}
# Of these the values have the default dtype, whatever the arguments; of the others, where these hold a fraction.
FLOATS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def unnamed(source: str) -> Iterator[tuple[int, str]]:
    """Return the lines that make a tensor, or hand over what makes one, and what they leave to the process."""
    tree = ast.parse(source)
    calls = {id(one.func): one for one in ast.walk(tree) if isinstance(one, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=maker) if maker in MAKERS:
                call = calls.get(id(node))
            case _:
                continue
        given = {one.arg for one in call.keywords} if call else set()
        if maker == "Generator" and not call:  # a type
            continue
        if "device" not in given and not (maker == "Generator" and call.args):
            yield node.lineno, "device"
        fractions = call and any(isinstance(getattr(one, "value", None), float) for one in ast.walk(call))
        if "dtype" not in given and (maker in FLOATS or fractions):
            yield node.lineno, "dtype"


def test_what_is_found() -> None:
    source = """
torch.zeros(2, dtype=torch.long)
torch.zeros(2, device=x.device)
torch.tensor([0.5], device="cpu")
torch.tensor([1, 2], device="cpu")
torch.zeros(2, dtype=torch.long, device="cpu")
torch.Generator()
torch.Generator("cpu")
torch.as_tensor(sizes)
torch.zeros_like(x)
map(torch.arange, sizes)
def drawn(generator: torch.Generator) -> None: ...
"""
    want = [(2, "device"), (3, "dtype"), (4, "dtype"), (7, "device"), (9, "device"), (11, "device")]
    assert sorted(unnamed(source)) == want


def test_the_library_names_device_and_dtype_of_each_tensor_that_it_makes() -> None:
    package = Path(tokenprune.__file__).parent
    found = [
        f"{path.relative_to(package)}:{line}: name its {what}"
        for path in sorted(package.rglob("*.py"))
        for line, what in unnamed(path.read_text())
    ]
    assert not found


@each("default", DEFAULTS)
@each("method", ["downsample", "dynres"])
@torch.no_grad()
def test_pixels_and_the_guard(method: str, default: str) -> None:
    model, images = demo_model(), [photo(300, 200), photo(50, 90)]

    def answers(inputs: Any = None) -> tuple[Any, ...]:
        processor = llava()
        with tokenprune.patched(model, [method, "divprune"], keep=0.5, processor=processor, guard="warn"):
            inputs = asked(processor, *images) if inputs is None else inputs
            logits = model(**inputs).logits
            return inputs, logits, tokenprune.stats(model).guard

    inputs, logits, guard = answers()
    with defaulting(default):  # transformers' own processors do not run where tensors hold nothing
        found = answers(inputs if default == "meta" else None)
    assert all(torch.equal(found[0][name], inputs[name]) for name in inputs)
    assert torch.equal(found[1], logits) and found[2] == guard


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("policy", tokenprune.sessions.available_policies())
@torch.no_grad()
def test_a_session(policy: str, default: str, build) -> None:
    family = FAMILIES["llava"]
    images = images_of(family, 6)
    chosen = tokenprune.sessions.policy(policy, **{"proxy": [20, 21]} if policy == "streammem" else {})

    def logits() -> torch.Tensor:
        session = tokenprune.sessions.session(build(family), memory=120, horizon=10**6, policy=chosen)
        session.say([1, 20, 21, 22])
        for start in (0, 2, 4):
            block = images[start : start + 2]
            session.see(input_ids=[[one for image in block for one in image.ids]], **collated(family, block))
        assert session.stats.compressions
        return session.ask([30, 31, 32], max_new_tokens=3, return_dict=True).logits

    wanted = logits()
    with defaulting(default):
        assert torch.equal(logits(), wanted)


@each("default", DEFAULTS)
@each("method", ["divprune", "kitoke", "tome", "pixelprune", "earlytom", "dynres", "dyrate"])
def test_the_kit_for_methods(method: str, default: str) -> None:
    with defaulting(default, watched=default == "meta"):
        check_method(tokenprune.method(method))
