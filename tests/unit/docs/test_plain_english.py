# SPDX-License-Identifier: Apache-2.0
"""Keep docstrings, comments, messages and pages in plain technical English (dev/plain.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain", ROOT / "dev/plain.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readers_find_each_kind(plain: ModuleType) -> None:
    source = '"""What is left."""\n# A place in a list.\ndef of(one):\n    raise ValueError("keep is no number here")\n'
    assert list(plain.docstrings(source)) == [(1, "What is left.")]
    assert list(plain.comments(source)) == [(2, "A place in a list.")]
    assert list(plain.strings(source)) == [(4, "keep is no number here")]
    assert sorted(plain.assigned_names(source)) == [(3, "of"), (3, "one")]
    assert list(plain.page_lines("one\n```\ncode\n```\n|---|\ntwo")) == [(1, "one"), (6, "two")]


def test_markers_are_counted_per_kind(plain: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Return what is left of those that stand."""\n')
    assert plain.count_markers("docstrings", [file])[0] == 8
    assert plain.count_markers("docstrings", [file])[1].total() == 4
