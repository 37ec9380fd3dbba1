# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of scripts: the papers' table, with a way to call it, and what counts the house."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from papers_results import ROOT


@pytest.fixture(scope="module")
def papers() -> Iterator[Any]:
    """The script, as a module, and the modules that it is made of."""
    before, names = set(sys.modules), ("published", "settings", "sets", "outcomes", "tables", "counts")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
        parts = {name: importlib.import_module(f"papers.{name}") for name in names}
        yield SimpleNamespace(script=importlib.import_module("papers_table"), **parts)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("papers", "papers_table"):
            del sys.modules[name]


@pytest.fixture
def call(papers: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """call(*arguments): exit code, output and errors of the script."""
    monkeypatch.setenv("COLUMNS", "1000")

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["papers_table.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            papers.script.app()
        told = capsys.readouterr()
        return ended.value.code or 0, told.out, told.err

    return run


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "dev/house.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(scope="module")
def mutations() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "dev"))
        yield importlib.import_module("mutations")
    del sys.modules["mutations"]


@pytest.fixture(scope="module")
def sweep() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "dev"))
        yield importlib.import_module("sweep")
    del sys.modules["sweep"]
