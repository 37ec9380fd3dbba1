# SPDX-License-Identifier: Apache-2.0
"""README and the path through the pages stay short; long tables are folded, and every method's page has its parts."""

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
FIVE_MINUTES = 1200  # words, at 240 a minute
METHODS = tokenprune.available_methods()


def test_the_readme_is_a_page() -> None:
    assert len(README.splitlines()) <= 100 and count.words(README) <= 700


def test_the_path_is_read_in_an_hour_and_each_page_in_five_minutes() -> None:
    assert sum(WORDS[name] for name in count.PATH) <= 15_000
    assert not {name: WORDS[name] for name in count.PATH if WORDS[name] > FIVE_MINUTES}


def test_the_documentation_has_at_most_50_thousand_words() -> None:
    words = {path.name: len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md")}
    assert sum(words.values()) <= 50_000, sorted(words.items(), key=lambda item: -item[1])[:10]


GUIDES = [name for name in WORDS if name.startswith("guides/")]


@each("name", GUIDES)
def test_a_guide_has_at_most_500_words(name: str) -> None:
    """Without the tables that scripts write."""
    text = (ROOT / "docs" / name).read_text()
    assert count.words(re.sub(r"<!-- (\S+):begin.*?<!-- \1:end -->", "", text, flags=re.DOTALL)) <= 500


def test_the_sidebar_has_at_most_40_entries() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert len(list(pages(nav))) <= 40


@each("name", count.PATH)
def test_a_page_of_the_path_leads_on(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    _, first, *_ = filter(None, re.split(r"\n{2,}", re.sub(r"<!--.*?-->", "", text[text.index("# ") :])))
    assert count.words(first) < 100
    following = count.PATH[count.PATH.index(name) + 1 :][:1] or ("methods/",)
    assert following[0].rpartition("/")[2] in text or "methods/" in following[0]


def test_words_are_what_a_reader_sees() -> None:
    assert count.words("---\nhide: [toc]\n---\n# Two words\n\n<!-- not this -->\n| a | b |\n|---|---|\n") == 4
    assert count.words("[one](two.md) **three** → `four` <br>") == 3


def test_ten_rows_are_shown_and_the_rest_is_folded() -> None:
    table = "| a | b |\n|---|--:|\n" + "".join(f"| {row} | x |\n" for row in range(16))
    made = fold.folded(f"Text.\n\n{table}\nMore.\n")
    shown, rest = made.split("<details class=rest markdown>")
    assert "| 9 | x |" in shown and "| 10 | x |" not in shown and made.count("| a | b |\n|---|--:|\n") == 2
    assert "<summary>6 more</summary>" in rest and rest.index("| 15 | x |") < rest.index("</details>") < rest.index(
        "More."
    )
    short = table.replace("| 15 | x |\n", "")
    assert fold.folded(short) == short
    for whole in (f"```\n{table}```\n", f'<div id="board" data-filters="a"></div>\n\n{table}'):
        assert fold.folded(whole) == whole


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
    made = generator("method_pages")
    record = {path.stem: json.loads(path.read_text()) for path in made.KEPT.glob("*.json")}
    # ipcv and pevlm keep all tokens, view_select keeps images, no shipped model has the tower of earlytom, docprune
    # drops no part of a photograph, erase needs a processor, and learned a fitted file.
    assert set(METHODS) - set(record) == {"ipcv", "pevlm", "view_select", "earlytom", "docprune", "erase", "learned"}
    for name, kept in record.items():
        original = {"image": "the-photograph", "video": "the-video"}[kept["of"]]
        text = made.image(name)
        for file in (original, name):
            assert f"(../images/kept/{file}.webp)" in text and (made.KEPT / f"{file}.webp").is_file()
        assert f"{kept['kept']} of {kept['tokens']} tokens" in text
    assert {path.stem for path in made.KEPT.glob("*.webp")} == {*record, "the-photograph", "the-video"}


def test_a_method_page_has_its_row_of_numbers() -> None:
    made = generator("method_pages")
    row = made.row("divprune")
    # As in docs/results/all-methods.md.
    assert "| `divprune` | 95.2 | 69.5 [62–76] | 76.6 [70–82] | 84.4 [78–89] | 91.6 [86–95] |" in row
    assert "Not shown to beat `uniform` at 11 %; `random`, `uniform` at 25 %; " in row and "≤" not in row
    assert made.row("pixelprune") == ""  # not measured: LLaVA's tower has a fixed grid
    assert "(../results/video.md)" in made.row("evs") and made.row("view_select") == ""
