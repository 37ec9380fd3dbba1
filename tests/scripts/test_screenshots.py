# SPDX-License-Identifier: Apache-2.0
"""dev/screenshots.py finds what is wrong with a page, in a real browser, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_docs import ROOT, generator

# As wide whatever the fonts are.
WIDE = "<table style='width: 3000px'><tr><td>a cell</table>"
PAGES = {
    "good": f"<h1>Good</h1><div style='overflow-x: auto'>{WIDE}</div>",
    "loud": "<script>console.error('broken thing')</script>",
    "far": "<img src='https://example.org/far.png' alt=''>",
    "cut": f"<div style='overflow: hidden'>{WIDE}</div>",
    "gone": "<img src='gone.png' alt=''>",
}


@pytest.mark.parametrize("font", [8, 16, 32])
def test_what_is_wrong_with_a_page_is_said(browser: Any, tmp_path: Path, font: int) -> None:
    tool = generator("screenshots")
    for name, body in PAGES.items():
        head = "<!doctype html><html lang=en><link rel=icon href='data:,'><title>-</title>"
        (tmp_path / f"{name}.html").write_text(f"{head}<style>* {{font-size: {font}px}}</style><body>{body}")
    found = tool.check(browser, tmp_path, [f"{name}.html" for name in PAGES], tmp_path / "out")
    for name, said in {"loud": "broken thing", "far": "asks for https://example.org/far.png", "cut": "cut off"}.items():
        assert sum(one.startswith(f"{name}.html at ") and said in one for one in found) == 4, name
    assert any(one.startswith("gone.html at 400, dark: an image does not load") for one in found)
    assert not [one for one in found if one.startswith("good")]
    assert len(list((tmp_path / "out").glob("*.png"))) == 4 * len(PAGES)


def test_the_pages_are_of_the_site() -> None:
    hooks = {"index.html": "index.md"}
    for page in generator("screenshots").PAGES:
        name = hooks.get(page, page.replace("index.html", "README.md").replace(".html", ".md"))
        assert (ROOT / "docs" / name).is_file(), page
