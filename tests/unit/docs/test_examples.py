# SPDX-License-Identifier: Apache-2.0
"""Run the examples in docstrings, and require one for each public class and function."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import tokenprune
from tokenprune.integrations.hf.families.registry import ADAPTERS
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
    return {
        "tokenprune": tokenprune,
        "torch": torch,
        "model": model,
        "processor": processor,
        "image": photo,
        "inputs": inputs,
    }


@pytest.fixture(scope="module")
def photo() -> Any:
    pytest.importorskip("tokenprune_demo")
    from PIL import Image
    from skimage import data

    return Image.fromarray(data.astronaut())


@pytest.mark.parametrize("module_name", MODULES)
def test_examples_run(module_name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))  # examples may register methods
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
