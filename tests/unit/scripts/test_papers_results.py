# SPDX-License-Identifier: Apache-2.0
"""Test the papers' table: reading results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from each import each
from papers_results import truncate_file, write_results

DART_BASE = {"gqa": 61.9, "mmb": 64.7, "mme": 1862, "pope": 85.9, "sqa": 69.5, "vqav2": 78.5, "textvqa": 58.2}
DART_128 = {"gqa": 58.7, "mmb": 63.2, "mme": 1840, "pope": 80.1, "sqa": 69.1, "vqav2": 75.9, "textvqa": 56.4}


def read_column(papers: Any, folder: Path, method: str, column: str) -> dict[str, str]:
    """Return a column of a method's table, by row."""
    outcomes = papers.outcomes.read_all(folder, papers.settings.settings())
    table = next(candidate for candidate in papers.tables.comparison(outcomes.numbers) if candidate.title == method)
    column_index = list(table.header).index(column)
    return {row[0]: row[column_index] for row in table.rows}


def test_without_results_the_columns_are_empty(papers: Any) -> None:
    tables = papers.tables.comparison()
    assert {table.title for table in tables} >= {"unpatched", "dart", "fastv", "divprune", "vscan", "tome", "dymu"}
    num_columns = 0
    for table in tables[:-1]:
        for column_index, title in enumerate(table.header):
            if "yours" in title:
                num_columns += 1
                assert not any(row[column_index] for row in table.rows)
        assert table.header[1:] and all(len(row) == len(table.header) for row in table.rows)
    assert num_columns + len(tables[-1].rows) == len(papers.settings.settings())
    assert not any("".join(row[2:]) for row in tables[-1].rows)


def test_results_land_beside_the_published_numbers(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "dart-128-cut", DART_128)
    column = read_column(papers, tmp_path, "dart", "128 yours, at the cut")
    assert [column[task_set.title] for task_set in papers.sets.SETS.values()] == [
        "58.7 (+0.0)", "63.2 (+0.0)", "1840 (+0.0)", "80.1 (+0.0)", "69.1 (+0.0)", "75.9 (+0.0)", "56.4 (+0.0)",
    ]  # fmt: skip
    mean = sum(100 * DART_128[key] / DART_BASE[key] for key in DART_BASE) / 7
    assert column["mean of these, %"] == f"{mean:.1f} (+0.0)"
    assert column["average as printed, %"] == f"**{mean:.1f} ({mean - 98.0:+.1f})**"
    # Missing results stay empty, and other ways to count tokens are not compared.
    assert not any(read_column(papers, tmp_path, "dart", "128 yours, average").values())
    write_results(papers, tmp_path, "dart-128", DART_128)
    assert read_column(papers, tmp_path, "dart", "128 yours, average")["GQA"] == "58.7"
    base = read_column(papers, tmp_path, "unpatched", "576 yours")
    assert base["GQA"] == "61.9 (+0.0)" and base["mean of these, %"] == "100.0"


def test_differences_are_of_percentages_and_marked_above_one_point(papers: Any, tmp_path: Path) -> None:
    # Another split: all results are lower by a tenth, also without pruning. Then GQA falls by 2 more, SQA by half a
    # point.
    write_results(papers, tmp_path, "unpatched", {key: 0.9 * value for key, value in DART_BASE.items()})
    lower = {key: 0.9 * value for key, value in DART_128.items()} | {"gqa": 0.9 * (58.7 - 0.02 * 61.9)}
    write_results(papers, tmp_path, "dart-128-cut", lower | {"sqa": 0.9 * (69.1 - 0.005 * 69.5)})
    column = read_column(papers, tmp_path, "dart", "128 yours, at the cut")
    assert column["GQA"] == "**51.7 (-2.0)**" and column["SQA"] == "61.9 (-0.5)" and column["VQAv2"] == "68.3 (+0.0)"
    assert column["mean of these, %"].endswith("(-0.4)")
    # The unpatched model is compared in points; MME in hundredths of its maximum of 2800.
    write_results(papers, tmp_path, "unpatched", {"mme": 1848, "pope": 86.9}, date="20260102_000000")
    base = read_column(papers, tmp_path, "unpatched", "576 yours")
    assert base["GQA"] == "**55.7 (-6.2)**" and base["MME"] == "1848 (-0.5)"
    assert base["POPE"] == "86.9 (+0.0)"  # among the published results, DyMU's is the closest


def test_a_mean_covers_the_sets_that_both_have(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "dart-128-cut", {"gqa": 61.9, "pope": 85.9})
    published = (58.7 / 61.9 + 80.1 / 85.9) / 2 * 100
    column = read_column(papers, tmp_path, "dart", "128 yours, at the cut")
    assert column["mean of these, %"] == f"**100.0 ({100 - published:+.1f})**"


def test_methods_without_published_numbers_have_a_table_of_their_own(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "random-64", {"gqa": 0.5 * 61.9, "mme": 931})
    outcomes = papers.outcomes.read_all(tmp_path, papers.settings.settings())
    table = papers.tables.comparison(outcomes.numbers)[-1]
    (row,) = (row for row in table.rows if list(row[:2]) == ["`random`", "64"])
    assert list(row[2:]) == ["30.9", "", "931", "", "", "", "", "50.0"]


def test_lmms_evals_metrics_become_the_numbers_of_papers(papers: Any) -> None:
    """Use parts of results files of lmms-eval 0.7.3, with other values."""
    sets = papers.sets.SETS
    assert sets["gqa"].score({"alias": "gqa", "exact_match,none": 0.619, "exact_match_stderr,none": 0.004}) == 61.9
    assert sets["mmb"].score({"gpt_eval_score,none": 64.7, "submission,none": None}) == 64.7
    assert sets["mme"].score({"mme_perception_score,none": 1506.5, "mme_cognition_score,none": 355.5}) == 1862
    assert sets["mme"].score({"mme_perception_score,none": 1506.5}) is None
    assert sets["pope"].score({"pope_accuracy,none": 0.87, "pope_f1_score,none": 0.859}) == 85.9
    assert sets["textvqa"].score({"exact_match,none": 0.582, "exact_match_stderr_clt,none": 0.1}) == pytest.approx(58.2)
    assert sets["sqa"].score({"exact_match,none": True}) is None and sets["vqav2"].score({}) is None


def test_two_models_in_one_folder_are_reported(papers: Any, tmp_path: Path) -> None:
    path = write_results(papers, tmp_path, "dart-128", {"gqa": 60.0})
    all_settings = papers.settings.settings()
    assert papers.outcomes.read_all(tmp_path, all_settings).notes == ["Measured on llava-hf/llava-1.5-7b-hf."]
    other = write_results(papers, tmp_path, "dart-64", {"gqa": 60.0})
    other.write_text(path.read_text().replace("keep=98", "keep=30").replace("llava-1.5-7b-hf,", "llava-1.5-13b-hf,"))
    (note,) = papers.outcomes.read_all(tmp_path, all_settings).notes
    assert note == "Measured on llava-hf/llava-1.5-13b-hf and llava-hf/llava-1.5-7b-hf: not comparable."


def test_the_newest_file_counts_and_unusual_files_are_reported(papers: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "dart-128", {"gqa": 50.0, "vqav2": 70.0}, date="20260101_000000")
    newest = write_results(papers, tmp_path, "dart-128", {"gqa": 60.0}, date="20260203_000000")
    write_results(papers, tmp_path, "dart-128", {"gqa": 10.0}, date="20260301_000000", config={"limit": 8})
    # A file of the task with a similar name, and results of another task than the papers'.
    (newest.parent.parent / "submissions").mkdir()
    (newest.parent.parent / "submissions/mmbench_en_dev_static_results.json").write_text('{"overall_acc": 0.5}')
    changes = {"tasks": {"textvqa": "textvqa_val"}, "throughput": {"avg_failed_calls": 3.0}}
    write_results(papers, tmp_path, "dart-64", {"textvqa": 45.0}, **changes)
    outcomes = papers.outcomes.read_all(tmp_path, papers.settings.settings())
    assert outcomes.numbers == {"dart-128": {"gqa": 60.0, "vqav2": 70.0}, "dart-64": {"textvqa": 45.0}}
    assert any("--limit 8" in note for note in outcomes.notes)
    assert any("textvqa_val, not textvqa_val_ocr" in note for note in outcomes.notes)
    assert any("calls of generate failed" in note for note in outcomes.notes)


def replace_metrics(**metrics: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = json.loads(path.read_text())
        data["results"]["gqa"] = {"alias": "gqa"} | metrics
        path.write_text(json.dumps(data))

    return change


@each(
    ("breaks", "message"),
    [
        (truncate_file, "JSON (Expecting"),
        (lambda path: path.write_text("[]"), "is not a results file of lmms-eval"),
        (lambda path: path.write_text('{"results": {}}'), "is not a results file of lmms-eval"),
        (lambda path: path.write_text('{"results": {"gqa": 1}, "config": {}}'), "not tasks with metrics"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "cannot be read"),
        (replace_metrics(), "exact_match of gqa is not"),
        (replace_metrics(**{"exact_match,none": "N/A"}), "exact_match of gqa is not"),
        (replace_metrics(**{"exact_match,none": float("nan")}), "exact_match of gqa is not"),
        (replace_metrics(**{"exact_match,none": 61.9}), "between 0 and 100"),
        (lambda path: path.write_text(path.read_text().replace("keep=30", "keep=64")), "it has keep=64 instead"),
        (lambda path: path.write_text(path.read_text().replace("method=dart", "method=none")), "it has method=none"),
    ],
)  # fmt: skip
def test_a_broken_file_is_named(papers: Any, call: Any, tmp_path: Path, breaks: Any, message: str) -> None:
    path = write_results(papers, tmp_path, "dart-64", {"gqa": 50.0})
    write_results(papers, tmp_path, "unpatched", {"gqa": 60.0})
    breaks(path)
    code, out, error = call("table", tmp_path)
    assert code == 2 and message in error and str(path) in error and "rename these files" in error and not out
    assert str(tmp_path / "unpatched") not in error


def test_a_folder_without_results_is_an_error(papers: Any, call: Any, tmp_path: Path) -> None:
    assert "is not a folder" in call("table", tmp_path / "absent")[2]
    code, _, error = call("table", tmp_path)
    assert code == 2 and "lacks the folders of" in error
    assert "Use .md or .html" in call("table", "--out", tmp_path / "table.pdf")[2]
    assert "Cannot write" in call("table", "--out", tmp_path / "absent/table.md")[2]


def test_the_table_says_what_is_missing(papers: Any, call: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "dart-64", {"gqa": 50.0})
    code, output, _ = call("table", tmp_path)
    assert code == 0 and "Percentages need results of `unpatched`." in output
    assert "Not measured: unpatched, downsample-192" in output
    assert "In part: dart-64 (MMB, MME, POPE, SQA, VQAv2, TextVQA)." in output
    assert re.search(r"^\| GQA .*\| 50\.0 \|", output, re.MULTILINE)


def test_html_has_the_same_cells_and_loads_nothing(papers: Any, call: Any, tmp_path: Path) -> None:
    write_results(papers, tmp_path, "unpatched", DART_BASE)
    write_results(papers, tmp_path, "dart-128-cut", DART_128 | {"gqa": 40.0})
    assert call("table", tmp_path, "--out", tmp_path / "table.html")[0] == 0
    text = (tmp_path / "table.html").read_text()
    page = ElementTree.fromstring(re.sub(r"^<!doctype html>|<meta [^>]*>", "", text))
    assert "<b>40.0 (" in text and "<script" not in text
    sources = papers.published.published().sources.values()
    loaded = {value for tag in page.iter() for name, value in tag.attrib.items() if name in ("src", "href")}
    assert loaded == {f"https://arxiv.org/abs/{source.arxiv}" for source in sources}
    outcomes = papers.outcomes.read_all(tmp_path, papers.settings.settings())
    tables = [*papers.tables.comparison(outcomes.numbers), papers.tables.sources()]
    cells = [list(row) for table in tables for row in (table.header, *table.rows)]
    plain = [[re.sub(r"[*`]|\]\(http[^)]*\)|\[(?=\d)", "", cell) for cell in row] for row in cells]
    assert [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")] == plain
    odd = papers.tables.to_html([papers.tables.Table("a < b", ["x & y"], [["**<script>**"]])], "t", [])
    assert "<script>" not in odd and "<b>&lt;script&gt;</b>" in odd and "x &amp; y" in odd
