# SPDX-License-Identifier: Apache-2.0
"""dev/screenshots.py finds what is wrong with a page, in a real browser, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.docs.test_docs import ROOT, generator

# As wide whatever the fonts are.
WIDE = "<table style='width: 3000px'><tr><td>a cell</table>"
PAGES = {
    "good": f"<h1>Good</h1><div style='overflow-x: auto'>{WIDE}</div>",
    "loud": "<script>console.error('broken thing')</script>",
    "far": "<img src='https://example.org/far.png' alt=''>",
    "cut": f"<div style='overflow: hidden'>{WIDE}</div>",
    "gone": "<img src='gone.png' alt=''>",
}


# A script, an address and a file fail whatever the fonts are: what is wide is tried with all of them.
FONTS = {name: (8, 16, 32) if "table" in body else (16,) for name, body in PAGES.items()}


def test_what_is_wrong_with_a_page_is_said(browser: Any, tmp_path: Path) -> None:
    tool, names = generator("screenshots"), []
    for name, font in ((name, font) for name, fonts in FONTS.items() for font in fonts):
        head = "<!doctype html><html lang=en><link rel=icon href='data:,'><title>-</title>"
        style = f"<style>* {{font-size: {font}px}}</style>"
        names.append(f"{name}{font}.html")
        (tmp_path / names[-1]).write_text(f"{head}{style}<body>{PAGES[name]}")
    found = tool.check(browser, tmp_path, names, tmp_path / "out")
    said = {"loud16": "broken thing", "far16": "asks for https://example.org/far.png"}
    for name, what in (said | {f"cut{font}": "cut off" for font in FONTS["cut"]}).items():
        assert sum(one.startswith(f"{name}.html at ") and what in one for one in found) == 4, name
    assert any(one.startswith("gone16.html at 390, dark: an image does not load") for one in found)
    assert not [one for one in found if one.startswith("good")]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4 * len(names)


def test_the_pages_are_of_the_site() -> None:
    hooks = {"index.html": "index.md"}
    for page in generator("screenshots").PAGES:
        name = hooks.get(page, page.replace("index.html", "README.md").replace(".html", ".md"))
        assert (ROOT / "docs" / name).is_file(), page
