# SPDX-License-Identifier: Apache-2.0
"""The glossary can be searched by eye: terms in order, each explained in a few sentences."""

from __future__ import annotations

import re
from pathlib import Path

from each import each
from tokenprune.selection.method import Site

PAGE = (Path(__file__).parents[3] / "docs/start/quickstart.md").read_text()
ENTRIES = dict(re.findall(r"^## (.+?)\n\n(.+?)(?=\n## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_terms_are_in_alphabetical_order() -> None:
    assert list(ENTRIES) == sorted(ENTRIES, key=str.casefold)
    assert len(ENTRIES) == PAGE.count("\n## ")


def test_the_figure_and_all_sites_are_there() -> None:
    assert "](images/sites.svg)" in PAGE
    assert re.findall(r"`([A-Z_]+)`", ENTRIES["Site"]) == list(Site)


@each("term", ENTRIES)
def test_a_term_is_explained_in_at_most_three_sentences(term: str) -> None:
    prose = re.sub(r"See\s+\[.*?\]\(.*?\)\.", "", re.sub(r"`[^`]*`", "code", ENTRIES[term]), flags=re.DOTALL)
    assert 1 <= len(re.findall(r"[.?](?=\s|$)", prose)) <= 3
