# SPDX-License-Identifier: Apache-2.0
"""Run the examples in docstrings, and require one for each public class and function."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenprune
import tokenprune.testing
from tokenprune.integrations.hf.families.registry import ADAPTERS
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.methods import registry
from tokenprune.models.families import FAMILIES

ROOT = Path(__file__).parents[3]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "tokenprune").rglob("*.py"))
    if re.search(r"^ +>>> ", path.read_text(), re.MULTILINE)
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def names(photo: Any) -> dict[str, Any]:
    """Names that every example may use without defining them."""
    model, processor = tokenprune.demo_model()
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What color is the bar?"}]}],
        add_generation_prompt=True,
    )
    inputs = processor(images=photo, text=prompt, return_tensors="pt")
    modules = {"tokenprune": tokenprune, "torch": torch}
    return modules | {"model": model, "processor": processor, "image": photo, "inputs": inputs}


@pytest.fixture(scope="module")
def photo() -> Any:
    pytest.importorskip("tokenprune_demo")
    from PIL import Image
    from skimage import data

    return Image.fromarray(data.astronaut())


@pytest.mark.parametrize("module_name", MODULES)
def test_examples_run(module_name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenprune.available_methods()
    tokenprune.sessions.available_policies()  # load both registries before they are copied
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # examples may register methods and policies
    monkeypatch.setattr(policies, "_POLICIES", dict(policies._POLICIES))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        pytest.skip(f"{module_name} needs {error.name}")
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    output: list[str] = []
    for test in doctest.DocTestFinder().find(module, globs={**vars(module), **names}):
        with mock.patch.dict(ADAPTERS), mock.patch.dict(FAMILIES):  # examples may register families
            runner.run(test, out=output.append)
        if tokenprune.is_patched(names["model"]):
            tokenprune.unpatch(names["model"])
    assert runner.tries and not runner.failures, "".join(output)


def lacks_example(item: Any) -> bool:
    return ">>> " not in (inspect.getdoc(item) or "")


def is_documented(item: Any) -> bool:
    is_error = inspect.isclass(item) and issubclass(item, Exception)
    return (inspect.isclass(item) or inspect.isroutine(item)) and not is_error


@pytest.mark.parametrize("module", [tokenprune, tokenprune.testing], ids=lambda module: module.__name__)
def test_public_names_have_an_example(module: Any) -> None:
    public = {name: getattr(module, name) for name in module.__all__}
    missing = [name for name, item in public.items() if is_documented(item) and lacks_example(item)]
    assert not missing, f"add an Examples: section to the docstrings of {', '.join(missing)}"


def test_methods_have_an_example() -> None:
    classes = {name: tokenprune.method_info(name).cls for name in tokenprune.available_methods()}
    missing = [name for name, cls in classes.items() if cls.__module__.startswith("tokenprune.") and lacks_example(cls)]
    assert not missing, f"add an Examples: section to the docstrings of {', '.join(missing)}"
