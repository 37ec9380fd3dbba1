# SPDX-License-Identifier: Apache-2.0
"""Test that dev/screenshots.py finds the problems of a page in a browser, and reports none for good pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.docs.test_docs import ROOT, generator

# As wide with any font.
WIDE = "<table style='width: 3000px'><tr><td>a cell</table>"
PAGES = {
    "good": f"<h1>Good</h1><div style='overflow-x: auto'>{WIDE}</div>",
    "loud": "<script>console.error('broken thing')</script>",
    "far": "<img src='https://example.org/far.png' alt=''>",
    "cut": f"<div style='overflow: hidden'>{WIDE}</div>",
    "gone": "<img src='gone.png' alt=''>",
}


# Scripts, addresses and files fail with any font, but wide content is tried with all font sizes.
FONTS = {name: (8, 16, 32) if "table" in body else (16,) for name, body in PAGES.items()}


def test_problems_of_a_page_are_reported(browser: Any, tmp_path: Path) -> None:
    tool, names = generator("screenshots"), []
    for name, font in ((name, font) for name, fonts in FONTS.items() for font in fonts):
        head = "<!doctype html><html lang=en><link rel=icon href='data:,'><title>-</title>"
        style = f"<style>* {{font-size: {font}px}}</style>"
        names.append(f"{name}{font}.html")
        (tmp_path / names[-1]).write_text(f"{head}{style}<body>{PAGES[name]}")
    problems = tool.check(browser, tmp_path, names, tmp_path / "out")
    expected = {"loud16": "broken thing", "far16": "asks for https://example.org/far.png"}
    for name, text in (expected | {f"cut{font}": "cut off" for font in FONTS["cut"]}).items():
        assert sum(problem.startswith(f"{name}.html at ") and text in problem for problem in problems) == 4, name
    assert any(problem.startswith("gone16.html at 390, dark: an image does not load") for problem in problems)
    assert not [problem for problem in problems if problem.startswith("good")]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4 * len(names)


def test_the_pages_are_of_the_site() -> None:
    hooks = {"index.html": "index.md"}
    for page in generator("screenshots").PAGES:
        name = hooks.get(page, page.replace("index.html", "README.md").replace(".html", ".md"))
        assert (ROOT / "docs" / name).is_file(), page
