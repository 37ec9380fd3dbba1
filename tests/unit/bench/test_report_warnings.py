# SPDX-License-Identifier: Apache-2.0
"""Test the warnings of the report, and the runs that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from report_runs import BASE, GOOD, QUESTIONS, RIVALS, header, made, result, timing
from tests.unit.api.test_cli import call, refused
from tokenprune import TokenPruneError
from tokenprune.models.model_config import describe_known_images
from tokenprune_bench import results
from tokenprune_bench.report import compare, warnings
from tokenprune_bench.report.page import make_page
from tokenprune_bench.report.runs import Run, read_runs
from tokenprune_demo.drawn_sets import draw_set


def list_codes(*records: dict[str, Any], **changes: Any) -> list[str]:
    summary = results.summarise([header(**changes), BASE, *records])
    return [warning.code for warning in warnings.find_warnings(summary)]


def get_warning(code: str, *records: dict[str, Any], **changes: Any) -> warnings.RunWarning:
    summary = results.summarise([header(**changes), BASE, *records])
    return next(warning for warning in warnings.find_warnings(summary) if warning.code == code)


def write_run(path: Path, *records: dict[str, Any], **changes: Any) -> Path:
    path.write_text(
        "".join(json.dumps(record) + "\n" for record in (header(**changes), BASE, *(records or (*RIVALS, GOOD))))
    )
    return path


# -- warnings ----------------------------------------------------------------------------------------------------------


def test_a_clean_run_has_no_warnings_and_baselines_are_not_warned_of() -> None:
    assert list_codes(*RIVALS, GOOD) == []  # random and downsample may lose both kinds


def test_worse_and_not_better_are_told_apart() -> None:
    worse, equal = result("worse", 0.25, 40, 60), result("equal", 0.25, 60, 60)
    worse_than_random = get_warning("worse-than-random", *RIVALS, worse, equal)
    assert len(worse_than_random.items) == 1 and worse_than_random.items[0].startswith("worse at 0.25: -10.0 points [-")
    assert worse_than_random.level is warnings.Level.BAD and "random tokens get a higher" in worse_than_random.text
    assert get_warning("not-better-than-random", *RIVALS, worse, equal).items == ("equal at 0.25",)
    # 50 % equals downsample's 50 %: neither better nor worse.
    assert get_warning("not-better-than-downsample", *RIVALS, worse).items == ("worse at 0.25",)
    assert "worse-than-downsample" in list_codes(*RIVALS, result("worst", 0.25, 40, 40))
    assert "200 questions do not show" in get_warning("not-better-than-random", *RIVALS, equal).text


def test_missing_baselines_are_reported() -> None:
    assert list_codes(RIVALS[0], GOOD) == ["no-downsample"]
    assert list_codes(GOOD) == ["no-random", "no-downsample"]


def test_lost_kinds_are_named_and_text_apart() -> None:
    lost = result("lost", 0.25, 79, 70), result("lost", 0.5, 80, 79)
    text_collapse = get_warning("ocr-collapse", *RIVALS, *lost)
    assert text_collapse.items == ("lost at 0.25: word 100 → 70 %", "lost at 0.5: word 100 → 79 %")
    # 80 % does not count as a collapse.
    assert get_warning("collapse", *RIVALS, *lost).items == ("lost at 0.25: colour 100 → 79 %",)
    reading = ("OCR", "digits", "scene_text", "doc-vqa")
    for kind in (*reading, "context", "keywords"):
        codes = list_codes(*RIVALS, lost[1], kinds=["colour", kind])
        assert ("ocr-collapse" in codes, "collapse" in codes) == (kind in reading, kind not in reading), kind


def test_slow_and_busy_runs_are_named() -> None:
    def timed(ratio: float, load: float = 0.5) -> dict[str, Any]:
        return GOOD | dict(timing=timing(ratio, load))

    assert list_codes(*RIVALS, timed(0.99)) == []
    not_faster = get_warning("not-faster", *RIVALS, timed(1.0))
    assert not_faster.items == ("good at 0.25: 1.00 × the unpatched time",)
    assert list_codes(*RIVALS, timed(0.5, load=2.4)) == []
    assert "2.6 on 2 cores" in get_warning("busy", *RIVALS, timed(0.5, load=2.6)).text
    # Unreliable times lead to no other warning.
    assert list_codes(*RIVALS, timed(1.2, load=2.6)) == ["busy"]
    assert list_codes(*RIVALS, GOOD | dict(timing=dict(repeats=1, rows=1, load=None, other=1))) == []


def test_few_questions_are_named() -> None:
    def short(record: dict[str, Any]) -> dict[str, Any]:
        return record | dict(right=[record["right"][0][:20]], questions=20)

    records = [header(kind_of_question="01" * 8 + "0" * 4), short(BASE), *map(short, RIVALS), short(GOOD)]
    (few_questions,) = (
        warning for warning in warnings.find_warnings(results.summarise(records)) if warning.code == "few-questions"
    )
    assert few_questions.title == "Only 20 questions" and "the smallest kind has 8 questions" in few_questions.text


def test_missing_results_are_named() -> None:
    skipped = [dict(record="skipped", method="odd", keep=keep, reason="it cannot") for keep in (0.5, 0.25)]
    assert get_warning("skipped-methods", *RIVALS, GOOD, *skipped).items == ("odd at 0.5, 0.25: it cannot",)
    data = dict(name="mine", questions=QUESTIONS, digest="d", skipped=["line 3: no question", "line 9: bad"])
    skipped_rows = get_warning("skipped-rows", *RIVALS, GOOD, data=data)
    assert skipped_rows.title == "2 rows left out" and skipped_rows.items == ("line 3: no question", "line 9: bad")
    plan = dict(seeds=[0], methods=["random", "downsample", "good"], keeps=[0.25])
    assert list_codes(*RIVALS, GOOD, plan=plan) == []
    assert "3 of 4 results" in get_warning("unfinished", *RIVALS, plan=plan).text


def test_the_page_and_the_command_warn_about_shipped_models() -> None:
    shipped = {"model": "demo_vlm (shipped)", "weights": "abc"}
    message = "demo_vlm (shipped) was trained only on synthetic scenes: do not compare methods on other images with it"
    for name, weights in (("photos.jsonl", "abc"), ("photos.jsonl", None), (f"{results.DRAWN_PREFIX}documents", "abc")):
        run = made("", environment=shipped | {"weights": weights}, data={"name": name, "skipped": []})
        known = name != "photos.jsonl" or weights is None
        assert (message in make_page([run])) is not known
        assert any(message in line for line in warnings.format_warnings(run.results)) is not known
    assert "photos and pages with drawn objects" in describe_known_images("demo_smol (shipped)")
    assert draw_set("documents", 1).about()["name"].startswith(results.DRAWN_PREFIX)


def test_a_page_without_a_winner_shows_no_card_of_one() -> None:
    low = [result("unpatched", 1.0, 19, 19), result("some", 0.25, 19, 19)]
    page = make_page([Run("run", results.summarise([header(), *low]))])
    assert "No verdict" in page and "Best at" not in page and "The best setting has the fewest" not in page
    assert "Best at" in make_page([made()]) and "The best setting has the fewest" in make_page([made()])


def test_the_worst_comes_first_and_lines_are_short() -> None:
    many = [result(f"m{index}", 0.25, 30, 30) | dict(timing=timing(1.2, 9)) for index in range(6)]
    records = [header(), BASE, *RIVALS, *many, dict(record="skipped", method="odd", keep=1, reason="no")]
    summary = results.summarise(records)
    found_warnings = warnings.find_warnings(summary)
    assert [warning.level for warning in found_warnings] == sorted(warning.level for warning in found_warnings)
    assert {"worse-than-random", "ocr-collapse", "busy", "skipped-methods"} <= {
        warning.code for warning in found_warnings
    }
    lines = warnings.format_warnings(summary)
    assert lines[0].startswith("Worse than `random`: m0 at 0.25: -30.0 points") and lines[0].endswith("; and 2 more")
    assert not [line for line in lines if "busy" in line or "left out" in line]  # the tables show these


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_cannot_be_named_twice(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a.jsonl")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.jsonl").write_text(first.read_text())
    for same in (first, tmp_path / "run"):
        with pytest.raises(TokenPruneError, match=r"are the same run"):
            read_runs([first, write_run(tmp_path / "b.jsonl", date="later"), same])
    runs = read_runs([first, write_run(tmp_path / "b.jsonl", date="later")])
    assert [(run.label, run.title) for run in runs] == [("A", "A: a.jsonl"), ("B", "B: b.jsonl")]
    assert read_runs([first])[0].title == "tiny"


@each(
    "text, message",
    [
        (None, "Cannot read"),
        ("", "its first line is not a header"),
        ("{", "is not a file of JSON lines"),
        (json.dumps(header()), "lack a result of the unpatched model"),
        (json.dumps(header(kinds=7)) + "\n" + json.dumps(BASE), "is damaged"),
        (json.dumps(header(environment=dict(cores="x"))) + "\n" + json.dumps({**BASE, "stats": 3}), "is damaged"),
        (json.dumps(header(metric="none")) + "\n" + json.dumps(BASE), "is damaged"),
        (json.dumps(header()) + "\n" + json.dumps(BASE | dict(extra=float("nan"))), "is damaged"),
    ],
)
def test_unreadable_runs_are_named(text: str | None, message: str, tmp_path: Path) -> None:
    good, bad = write_run(tmp_path / "good.jsonl"), tmp_path / "bad.jsonl"
    if text is not None:
        bad.write_text(text)
    with pytest.raises(TokenPruneError, match=message) as error:
        read_runs([good, bad])
    assert str(bad) in str(error.value)


def test_runs_are_compared_where_they_asked_the_same() -> None:
    data = dict(name="x", questions=QUESTIONS, skipped=[])
    runs = [
        made("A"), made("B", environment=dict(model="other")), made("C", data=data | dict(digest="1")),
        made("D", data=data | dict(digest="1", name="y")), made("E", metric="relaxed"),
        made("F", kinds=["colour", "x"]),
    ]  # fmt: skip
    assert [[run.label for run in group] for group in compare.group_by_questions(runs)] == [
        ["A", "B"], ["C", "D"], ["E"], ["F"],
    ]  # fmt: skip
    assert compare.is_same_machine(runs) and not compare.is_same_machine([runs[0], made(environment=dict(threads=2))])


def test_the_table_of_two_runs_by_hand() -> None:
    first = made("A", *RIVALS, GOOD, result("good", 0.5, 100, 98))
    other = made(
        "B", *RIVALS, result("new", 0.25, 90, 80), result("good", 0.25, 96, 98), environment=dict(model="other")
    )
    (table,) = compare.build_comparisons([first, other])
    assert table.title == "A and B on the same questions"
    columns = ("accuracy %", "vs unpatched", "layer avg")
    assert table.columns[2:] == (f"A: {columns[0]}", *columns[1:], f"B: {columns[0]}", *columns[1:])
    rows = {tuple(cell.text for cell in row[:2]): [cell.text for cell in row[2:]] for row in table.rows}
    assert rows["unpatched", ""] == ["100.0", "", "100", "100.0", "", "100"]
    assert rows["good", "0.25"] == ["98.5", "-1.5", "25", "97.0", "-3.0", "25"]
    assert rows["good", "0.5"] == ["99.0", "-1.0", "50", "", "", ""]
    assert rows["new", "0.25"] == ["", "", "", "85.0", "-15.0", "25"]
    assert [row[0].text for row in table.rows] == ["unpatched", "random", "downsample", "good", "good", "new"]
    assert compare.build_comparisons([first]) == []


def test_the_command_takes_several_runs(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "a.jsonl"), write_run(tmp_path / "b.jsonl", result("bad", 0.25, 5, 5))
    page = tmp_path / "page.html"
    printed = call("report", first, other, "--details", "--html", page).stdout
    assert printed.count("Accuracy by kind of question") == 2
    assert "A and B on the same questions" in printed and "! Reading is lost: bad at 0.25: word 100 → 5 %" in printed
    assert page.read_text().startswith("<!doctype html>")
    text = call("report", first, other, "--markdown").stdout
    assert "## B: b.jsonl (tiny)" in text and "| good | 0.25 | 98.5 | -1.5 | 25 |" in text
    assert "- Reading is lost" in text and "**A and B on the same questions**" in text
    assert "## " not in call("report", first, "--markdown").stdout
    short = call("report", first, other).stdout  # fits on one screen
    assert len(short.splitlines()) <= 24 and max(map(len, short.splitlines())) <= 80
    assert "A = tiny (a.jsonl), B = tiny (b.jsonl)" in short and "Reading is lost" not in short
    assert "98.5 [96" in short and "--details" in short
    assert "--plot draws one run" in refused("report", first, other, "--plot", tmp_path / "p.png")
    assert "are the same run" in refused("report", first, first)
