# SPDX-License-Identifier: Apache-2.0
"""Test the leaderboard's script in a browser: it filters and sorts, and without it the table is complete."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.docs.test_docs import generator

SCRIPT = Path(__file__).parents[3] / "docs/javascripts/leaderboard.js"


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """Return the cells of the page's table in Markdown, with the titles first."""
    page = generator("leaderboard_page").PAGE.read_text()
    page = re.sub(r"\[`(\w+)`\]\([^)]*\)", r"\1", page)
    table = page.partition("<!-- board:begin")[2].partition("## Runs")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]


def show(browser: Any, rows: list[list[str]], script: bool = True) -> Any:
    filters = generator("leaderboard_page").FILTERS
    head, *body = ["".join(f"<th>{cell}</th>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row.replace('th>', 'td>')}</tr>" for row in body)
    heading = f'<h1 id="leaderboard">Leaderboard</h1><div id="board" data-filters="{",".join(filters)}"></div>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><table><tbody><tr><td>x</table>"
    page = browser.new_page()
    page.set_content(heading + table)
    if script:
        page.add_script_tag(content=SCRIPT.read_text())
    return page


def read_column(page: Any, index: int) -> list[str]:
    """Return the texts of a column in visible rows."""
    return page.locator(f"table >> nth=0 >> tbody tr:not([hidden]) td:nth-child({index + 1})").all_inner_texts()


def test_the_script_filters_and_sorts(browser: Any, rows: list[list[str]]) -> None:
    titles, *lines = rows
    page = show(browser, rows)
    assert (
        page.locator("output").inner_text() == f"{len(lines)} of {len(lines)} rows" and len(read_column(page, 0)) == 10
    )
    page.get_by_role("button", name=f"Show all {len(lines)}").click()
    assert len(read_column(page, 0)) == len(lines)
    served, acts, right = (titles.index(name) for name in ("vLLM", "acts", "right, %"))
    page.get_by_label("vLLM").select_option("yes")
    page.get_by_label("acts").select_option("before the language model")
    expected = [line for line in lines if line[served] == "yes" and line[acts] == "before the language model"]
    assert 0 < len(expected) < len(lines) and read_column(page, right) == [line[right] for line in expected]
    assert page.locator("output").inner_text() == f"{len(expected)} of {len(lines)} rows"
    page.get_by_label("vLLM").select_option("")
    page.get_by_label("acts").select_option("")
    title = page.get_by_role("button", name="right, %")
    title.click()
    shares = [float(cell.split()[0]) for cell in read_column(page, right)]
    assert shares == sorted(shares, reverse=True) and len(shares) == len(lines)
    title.click()
    assert [float(cell.split()[0]) for cell in read_column(page, right)] == shares[::-1]
    assert page.locator("th[aria-sort]").all_inner_texts() == ["right, %"]
    rank = titles.index("papers' rank")
    page.get_by_role("button", name="papers' rank").click()
    ranks = read_column(page, rank)
    filled = [int(cell.split()[0]) for cell in ranks if cell]
    assert filled == sorted(filled, reverse=True) and not any(ranks[len(filled) :]) and len(filled) < len(ranks)
    page.get_by_role("button", name="method").click()
    assert read_column(page, 0) == sorted(line[0] for line in lines)
    page.close()


def test_without_the_script_the_table_is_complete(browser: Any, rows: list[list[str]]) -> None:
    page = show(browser, rows, script=False)
    assert len(read_column(page, 0)) == len(rows) - 1 and page.locator("select, button").count() == 0
    page.close()
