# SPDX-License-Identifier: Apache-2.0
"""The default device and dtype of a process are not used: pixels, sessions and method checks give equal results.

tests/unit/methods/test_defaults_of_the_process.py covers all methods.
"""

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

MAKERS = {constructor.__name__ for constructor in _device_constructors()} | {"Generator"}
# These use the default dtype with any arguments. The other constructors use it if an argument is a fraction.
FLOATS = {"empty", "eye", "linspace", "logspace", "ones", "rand", "randn", "zeros"}


def find_unnamed(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, missing argument) of each call or reference that creates a tensor without device or dtype."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr=maker) if maker in MAKERS:
                call = calls.get(id(node))
            case _:
                continue
        keywords = {keyword.arg for keyword in call.keywords} if call else set()
        if maker == "Generator" and not call:  # a type
            continue
        if "device" not in keywords and not (maker == "Generator" and call.args):
            yield node.lineno, "device"
        fractions = call and any(isinstance(getattr(part, "value", None), float) for part in ast.walk(call))
        if "dtype" not in keywords and (maker in FLOATS or fractions):
            yield node.lineno, "dtype"


def test_find_unnamed() -> None:
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
    expected = [(2, "device"), (3, "dtype"), (4, "dtype"), (7, "device"), (9, "device"), (11, "device")]
    assert sorted(find_unnamed(source)) == expected


def test_tensors_are_created_with_device_and_dtype() -> None:
    package = Path(tokenprune.__file__).parent
    unnamed_arguments = [
        f"{path.relative_to(package)}:{line}: name its {argument}"
        for path in sorted(package.rglob("*.py"))
        for line, argument in find_unnamed(path.read_text())
    ]
    assert not unnamed_arguments


@each("default", DEFAULTS)
@each("method", ["downsample", "dynres"])
@torch.no_grad()
def test_pixels_and_the_guard(method: str, default: str) -> None:
    model, images = demo_model(), [photo(300, 200), photo(50, 90)]

    def run(inputs: Any = None) -> tuple[Any, ...]:
        processor = llava()
        with tokenprune.patched(model, [method, "divprune"], keep=0.5, processor=processor, guard="warn"):
            inputs = asked(processor, *images) if inputs is None else inputs
            logits = model(**inputs).logits
            return inputs, logits, tokenprune.stats(model).guard

    inputs, logits, guard = run()
    with defaulting(default):  # processors of transformers do not run on the meta device
        actual = run(inputs if default == "meta" else None)
    assert all(torch.equal(actual[0][name], inputs[name]) for name in inputs)
    assert torch.equal(actual[1], logits) and actual[2] == guard


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("policy", tokenprune.sessions.available_policies())
@torch.no_grad()
def test_a_session(policy: str, default: str, build) -> None:
    family = FAMILIES["llava"]
    images = images_of(family, 6)
    chosen = tokenprune.sessions.policy(policy, **{"proxy": [20, 21]} if policy == "streammem" else {})

    def run_session() -> torch.Tensor:
        session = tokenprune.sessions.session(build(family), memory=120, horizon=10**6, policy=chosen)
        session.say([1, 20, 21, 22])
        for start in (0, 2, 4):
            block = images[start : start + 2]
            session.see(input_ids=[[token_id for image in block for token_id in image.ids]], **collated(family, block))
        assert session.stats.compressions
        return session.ask([30, 31, 32], max_new_tokens=3, return_dict=True).logits

    expected = run_session()
    with defaulting(default):
        assert torch.equal(run_session(), expected)


@each("default", DEFAULTS)
@each("method", ["divprune", "kitoke", "tome", "pixelprune", "earlytom", "dynres", "dyrate"])
def test_check_method(method: str, default: str) -> None:
    with defaulting(default, watched=default == "meta"):
        check_method(tokenprune.method(method))
