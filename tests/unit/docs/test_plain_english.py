# SPDX-License-Identifier: Apache-2.0
"""Keep docstrings, comments, messages and pages in plain technical English (dev/plain.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.docs.test_docs import ROOT, generator

plain = generator("plain")


@pytest.mark.parametrize("folder", plain.CODE_FOLDERS)
@pytest.mark.parametrize("kind", ["docstrings", "comments", "strings"])
def test_code_has_few_markers(folder: str, kind: str) -> None:
    num_words, hits = plain.count_markers(kind, plain.list_files([folder], ".py"))
    assert num_words > 100
    assert 1000 * hits.total() / num_words <= plain.LIMITS[kind], hits


def test_pages_have_few_markers() -> None:
    num_words, hits = plain.count_markers("pages", plain.list_files(plain.PAGES, ".md", ".ipynb"))
    assert num_words > 10_000
    assert 1000 * hits.total() / num_words <= plain.LIMITS["pages"], hits


def test_code_does_not_use_the_listed_names() -> None:
    files = plain.list_files(plain.CODE_FOLDERS, ".py")
    names = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in plain.assigned_names(file.read_text())
    ]
    assert len(names) <= plain.MAX_NAMES, "\n".join(names)


def test_notebooks_are_read_as_pages(tmp_path: Path) -> None:
    file = tmp_path / "notebook.ipynb"
    cells = [{"cell_type": "markdown", "source": ["What is left."]}, {"cell_type": "code", "source": ["whatever = 1"]}]
    file.write_text(json.dumps({"cells": cells}))
    assert plain.read_text(file) == "What is left."
    assert plain.count_markers("pages", [file])[1].total() == 1


def test_readers_find_each_kind() -> None:
    source = '"""What is left."""\n# A place in a list.\ndef of(one):\n    raise ValueError("keep is no number here")\n'
    assert list(plain.docstrings(source)) == [(1, "What is left.")]
    assert list(plain.comments(source)) == [(2, "A place in a list.")]
    assert list(plain.strings(source)) == [(4, "keep is no number here")]
    assert sorted(plain.assigned_names(source)) == [(3, "of"), (3, "one")]
    assert list(plain.page_lines("one\n```\ncode\n```\n|---|\ntwo")) == [(1, "one"), (6, "two")]


def test_markers_are_counted_per_kind(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Return what is left of those that stand."""\n')
    assert plain.count_markers("docstrings", [file])[0] == 8
    assert plain.count_markers("docstrings", [file])[1].total() == 4
