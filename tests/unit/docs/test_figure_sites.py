# SPDX-License-Identifier: Apache-2.0
"""The committed figure of the six sites names no method; that of the site shows each in the card of its site."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import tokenprune
from tests.unit.docs.test_docs import generator
from tokenprune.selection.method import Site

SVG = "{http://www.w3.org/2000/svg}"
tool = generator("figure_sites")


def drawn(figure: str) -> list[tuple[float, str]]:
    """Return the texts of a figure, each with where it begins."""
    return [(float(text.get("x")), text.text) for text in ElementTree.fromstring(figure).iter(f"{SVG}text")]


def test_the_committed_figure_is_current_and_names_no_method() -> None:
    assert tool.FIGURE.read_text() == tool.figure(), "run python dev/figure_sites.py"
    words = {word for _, text in drawn(tool.figure()) for word in text.split()}
    assert set(Site) <= words and not words & set(tokenprune.available_methods())


def test_every_method_stands_in_the_card_of_its_site() -> None:
    texts = drawn(tool.figure(names=True))
    title = {text: x for x, text in texts if text in set(Site)}
    assert list(title) == list(Site) and sorted(title.values()) == list(title.values())
    for name in tokenprune.available_methods():
        (x,) = [x for x, text in texts if name in re.split(r" · ", text)]
        site = max((one for one in Site if title[one] <= x + 40), key=title.get)
        assert site == tokenprune.method_info(name).site, name
