# SPDX-License-Identifier: Apache-2.0
"""The committed figure of the six sites, and the figure with method names on the site."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import tokenprune
from tests.unit.docs.test_docs import generator
from tokenprune.selection.method import Site

SVG = "{http://www.w3.org/2000/svg}"
tool = generator("figure_sites")


def read_texts(figure: str) -> list[tuple[float, str]]:
    """Return (x coordinate, text) of each text in a figure."""
    return [(float(text.get("x")), text.text) for text in ElementTree.fromstring(figure).iter(f"{SVG}text")]


def test_the_committed_figure_is_current_and_names_no_method() -> None:
    assert tool.FIGURE.read_text() == tool.figure(), "run python dev/figure_sites.py"
    words = {word for _, text in read_texts(tool.figure()) for word in text.split()}
    assert set(Site) <= words and not words & set(tokenprune.available_methods())


def test_every_method_is_in_the_card_of_its_site() -> None:
    texts = read_texts(tool.figure(names=True))
    title = {text: x for x, text in texts if text in set(Site)}
    assert list(title) == list(Site) and sorted(title.values()) == list(title.values())
    for name in tokenprune.available_methods():
        (x,) = [x for x, text in texts if name in re.split(r" · ", text)]
        site = max((candidate for candidate in Site if title[candidate] <= x + 40), key=title.get)
        assert site == tokenprune.method_info(name).site, name
