# SPDX-License-Identifier: Apache-2.0
"""Limits on the length of README and pages, folded tables, and the template of method pages."""

from __future__ import annotations

import json
import re

import yaml

import tokenprune
from each import each
from tests.unit.docs.test_docs import ROOT, generator
from tests.unit.docs.test_site import pages

count = generator("words")
fold = generator("fold")
WORDS = count.pages()
README = (ROOT / "README.md").read_text()
FIVE_MINUTES = 1200  # words, at 240 words per minute
METHODS = tokenprune.available_methods()


def test_the_readme_has_at_most_700_words() -> None:
    assert len(README.splitlines()) <= 100 and count.words(README) <= 700


def test_pages_of_the_path_are_short() -> None:
    assert sum(WORDS[name] for name in count.PATH) <= 15_000
    assert not {name: WORDS[name] for name in count.PATH if WORDS[name] > FIVE_MINUTES}


def test_the_documentation_has_at_most_50_thousand_words() -> None:
    words = {path.name: len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")}
    assert sum(words.values()) <= 50_000, sorted(words.items(), key=lambda item: -item[1])[:10]


GUIDES = [name for name in WORDS if name.startswith("guides/")]


@each("name", GUIDES)
def test_a_guide_has_at_most_500_words(name: str) -> None:
    """Generated tables are not counted."""
    text = (ROOT / "docs" / name).read_text()
    assert count.words(re.sub(r"<!-- (\S+):begin.*?<!-- \1:end -->", "", text, flags=re.DOTALL)) <= 500


def test_the_sidebar_has_at_most_40_entries() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert len(list(pages(nav))) <= 40


@each("name", count.PATH)
def test_a_page_of_the_path_links_to_the_next(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    _, first, *_ = filter(None, re.split(r"\n{2,}", re.sub(r"<!--.*?-->", "", text[text.index("# ") :])))
    assert count.words(first) < 100
    following = count.PATH[count.PATH.index(name) + 1 :][:1] or ("methods/",)
    assert following[0].rpartition("/")[2] in text or "methods/" in following[0]


def test_count_words() -> None:
    assert count.words("---\nhide: [toc]\n---\n# Two words\n\n<!-- not this -->\n| a | b |\n|---|---|\n") == 4
    assert count.words("[one](two.md) **three** → `four` <br>") == 3


def test_long_tables_are_folded_after_ten_rows() -> None:
    table = "| a | b |\n|---|--:|\n" + "".join(f"| {row} | x |\n" for row in range(16))
    folded = fold.folded(f"Text.\n\n{table}\nMore.\n")
    shown, rest = folded.split("<details class=rest markdown>")
    assert "| 9 | x |" in shown and "| 10 | x |" not in shown and folded.count("| a | b |\n|---|--:|\n") == 2
    assert "<summary>6 more</summary>" in rest and rest.index("| 15 | x |") < rest.index("</details>") < rest.index(
        "More."
    )
    short = table.replace("| 15 | x |\n", "")
    assert fold.folded(short) == short
    for unchanged in (f"```\n{table}```\n", f'<div id="board" data-filters="a"></div>\n\n{table}'):
        assert fold.folded(unchanged) == unchanged


@each("name", METHODS)
def test_a_method_page_follows_the_template(name: str) -> None:
    text = (ROOT / f"docs/methods/{name}.md").read_text()
    summary = text.split("\n\n")[1]
    plain = re.sub(r"`[^`]*`|\[|\]\([^)]*\)", "", summary)
    assert 1 <= len(re.findall(r"[.!?](?=\s|$)", plain)) <= 3 and count.words(summary) <= 60, summary
    parts = ("```python", "**Use it when**", "**Avoid it when**", "**Cost**", "**Differences from the paper**")
    indices = [text.find(part) for part in parts]
    assert -1 not in indices and indices == sorted(indices), parts[indices.index(-1)] if -1 in indices else parts
    assert count.words(re.sub(r"```.*?```", "", text, flags=re.DOTALL)) <= 135


def test_a_method_page_shows_the_kept_tokens() -> None:
    method_pages = generator("method_pages")
    record = {path.stem: json.loads(path.read_text()) for path in method_pages.KEPT.glob("*.json")}
    # ipcv and pevlm keep all tokens, view_select keeps images, no shipped model has the tower of earlytom, docprune
    # drops no part of a photograph, erase needs a processor, and learned a fitted file.
    assert set(METHODS) - set(record) == {"ipcv", "pevlm", "view_select", "earlytom", "docprune", "erase", "learned"}
    for name, kept in record.items():
        original = {"image": "the-photograph", "video": "the-video"}[kept["of"]]
        text = method_pages.image(name)
        for file in (original, name):
            assert f"(../images/kept/{file}.webp)" in text and (method_pages.KEPT / f"{file}.webp").is_file()
        assert f"{kept['kept']} of {kept['tokens']} tokens" in text
    assert {path.stem for path in method_pages.KEPT.glob("*.webp")} == {*record, "the-photograph", "the-video"}


def test_a_method_page_shows_its_results() -> None:
    method_pages = generator("method_pages")
    row = method_pages.row("divprune")
    # as in docs/results/all-methods.md
    assert "| `divprune` | 95.2 | 69.5 [62–76] | 76.6 [70–82] | 84.4 [78–89] | 91.6 [86–95] |" in row
    assert "Not shown to beat `uniform` at 11 %; `random`, `uniform` at 25 %; " in row and "≤" not in row
    assert method_pages.row("pixelprune") == ""  # not measured, because LLaVA's tower has a fixed grid
    assert "(../results/video.md)" in method_pages.row("evs") and method_pages.row("view_select") == ""
