# SPDX-License-Identifier: Apache-2.0
"""Import scripts of benchmarks/experiments and dev as modules, and call the script of the papers' table."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from papers_results import ROOT

EXPERIMENTS = "benchmarks/experiments"
FOLDERS = ("dev", *(f"{EXPERIMENTS}/{folder}" for folder in ("training/smol", "studies", "gpu")), EXPERIMENTS)


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], Any]]:
    """Return a function that imports a file of `FOLDERS` as a module. The next test file imports it again."""
    threads, before = torch.get_num_threads(), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for folder in FOLDERS:
            patch.syspath_prepend(str(ROOT / folder))
        yield importlib.import_module
    torch.set_num_threads(threads)
    # Remove generic names such as `common` and `rows`, which other tests may import.
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if file.startswith((str(ROOT / "benchmarks/experiments"), str(ROOT / "dev"))):
            del sys.modules[name]


@pytest.fixture(scope="module")
def house(script: Any) -> ModuleType:
    return script("house")


@pytest.fixture(scope="module")
def papers(script: Any) -> Any:
    """Return the script and its modules."""
    names = ("published", "settings", "sets", "outcomes", "tables", "counts")
    return SimpleNamespace(script=script("papers_table"), **{name: script(f"papers.{name}") for name in names})


@pytest.fixture
def call(papers: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs the script with arguments and returns its exit code, output and errors."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["papers_table.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            papers.script.app()
        output = capsys.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run
