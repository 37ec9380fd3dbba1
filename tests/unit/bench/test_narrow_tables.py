# SPDX-License-Identifier: Apache-2.0
"""Test tables on a narrow screen, and the comparison of the demo."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from report_runs import GOOD, RIVALS, made
from tokenprune.cli import common
from tokenprune.cli.table import Cell, Table, split_table, to_rich
from tokenprune_bench import demo
from tokenprune_bench.profiling.model import load_model
from tokenprune_bench.tables import build_tables

KV_BYTES_PER_TOKEN = 4608  # of demo_vlm: keys and values of all layers in float32


def print_lines(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    for part in split_table(table, width):
        console.print(to_rich(part, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_number_is_cut_and_no_line_is_longer_than_the_screen(width: int) -> None:
    for table in build_tables(made("", *RIVALS, GOOD).results):
        lines = print_lines(table, width)
        assert max(map(len, lines)) <= width and "…" not in "".join(lines)
        shown = "".join(re.sub(r"[^\w.%+-]", "", line) for line in lines)
        for row in table.rows:
            for cell in row:
                for word in cell.text.split():
                    assert re.sub(r"[^\w.%+-]", "", word) in shown, (word, lines)
        assert all(any(name.split()[0] in line for line in lines) for name in table.columns)


def test_each_part_names_its_rows_and_the_notes_come_once() -> None:
    cells = [Cell(f"{index} of 100000") for index in range(9)]
    names = tuple(f"column {index}" for index in range(9))
    table = Table("Much", ("method", "keep", *names), [[Cell("divprune"), Cell("0.25"), *cells]], ("why",), True)
    parts = split_table(table, 60)
    assert [part.columns[:2] for part in parts] == [("method", "keep")] * 5
    assert sum((part.columns[2:] for part in parts), ()) == names
    assert [part.notes for part in parts] == [(), (), (), (), ("why",)]
    assert [part.title for part in parts] == ["Much", *["Much, continued"] * 4]
    assert split_table(table, 200) == [table]
    # A long text fills the width that numbers leave, and is broken between words.
    long = Table("", ("site", "limit", "meaning"), [[Cell("IN_LLM"), Cell("x2"), Cell("a cut " * 20)]], last_left=True)
    assert len(split_table(long, 60)) == 1 and max(map(len, print_lines(long, 60))) == 60


def test_a_message_is_broken_between_words_on_a_screen_and_whole_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for screen in (True, False):
        out = io.StringIO()
        console = Console(width=60, file=out, force_terminal=screen, color_system=None)
        monkeypatch.setattr(common, "get_console", lambda error, console=console: console)
        common.say("word [bold] " * 20)
        lines = out.getvalue().splitlines()
        assert (len(lines) > 1 and max(map(len, lines)) <= 60) if screen else len(lines) == 1
        assert out.getvalue().split() == ["word", "[bold]"] * 20


@pytest.mark.parametrize("method", ["divprune", "random"])
def test_demo_reports_answers_and_costs(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """divprune answers every question correctly with a quarter of the tokens, and random tokens do not."""
    monkeypatch.setattr(demo, "METHOD", method)
    result = demo.run_demo(load_model("demo_vlm", device="cpu"))
    wrong = [answer.question for answer in result.answers if not answer.is_right[1]]
    assert len(result.answers) == 6 and all(answer.is_right[0] for answer in result.answers)
    assert bool(wrong) == (method == "random")
    before, after = result.kv_bytes
    assert result.tokens == (256, 64) and before - after == (256 - 64) * KV_BYTES_PER_TOKEN
    lines = print_lines(demo.build_table(result), 80)
    assert sum(line.count("✗") for line in lines) == len(wrong) and max(map(len, lines)) <= 80
    image, page = demo.write_files(result, tmp_path / "out")
    assert image.is_file() and all(answer.question in page.read_text() for answer in result.answers)
