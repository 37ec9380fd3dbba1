# SPDX-License-Identifier: Apache-2.0
"""The figure of the six sites shows the methods that the registry has, each in the card of its site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from xml.etree import ElementTree

import tokenprune
from tokenprune.base import Site

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def drawn() -> list[tuple[float, str]]:
    """The texts of the committed figure, each with where it begins."""
    figure = ElementTree.parse(ROOT / "docs/images/sites.svg").getroot()
    return [(float(text.get("x")), text.text) for text in figure.iter(f"{SVG}text")]


def test_the_figures_are_current() -> None:
    spec = importlib.util.spec_from_file_location("figure_sites", ROOT / "dev/figure_sites.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, made in tool.figures().items():
        assert path.read_text() == made, "run python dev/figure_sites.py"


def test_every_method_stands_in_the_card_of_its_site() -> None:
    title = {text: x for x, text in drawn() if text in set(Site)}
    assert list(title) == list(Site) and sorted(title.values()) == list(title.values())
    for name in tokenprune.available_methods():
        (x,) = [x for x, text in drawn() if name in re.split(r" · ", text)]
        site = max((one for one in Site if title[one] <= x + 40), key=title.get)
        assert site == tokenprune.method_info(name).site, name
