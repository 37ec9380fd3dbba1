# SPDX-License-Identifier: Apache-2.0
"""Test the papers' table: running it, and its page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tokenprune
from papers_results import truncate_file, write_results
from tokenprune import Budget
from tokenprune.errors import OptionError, TokenPruneError

# -- run ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lmms_eval(papers: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace lmms-eval with a stand-in that records calls and writes a results file for each task outside of
    `fails`."""
    stand_in = SimpleNamespace(calls=[], fails=set(), interrupts=set())

    def run(command: list[str], **_: Any) -> Any:
        output = Path(command[command.index("--output_path") + 1])
        tasks = command[command.index("--tasks") + 1].split(",")
        stand_in.calls.append((output.name, *tasks))
        if output.name in stand_in.interrupts:
            raise KeyboardInterrupt
        tasks_of_sets = {papers.sets.set_of(task): task for task in tasks if (output.name, task) not in stand_in.fails}
        if tasks_of_sets:
            scores, date = dict.fromkeys(tasks_of_sets, 50.0), f"20260101_{len(stand_in.calls):06}"
            write_results(papers, output.parent, output.name, scores, date=date, tasks=tasks_of_sets)
        return SimpleNamespace(returncode=0)  # lmms-eval returns 0 even if the evaluation failed

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(papers.script, "_check_installed", lambda: None)
    return stand_in


SMALL = ("--methods", "random,dart", "--budgets", "64", "--sets", "gqa,mme")


def test_a_run_goes_on_where_it_stopped(
    papers: Any, call: Any, lmms_eval: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    lmms_eval.interrupts.add("dart-64")
    monkeypatch.setattr(sys, "argv", ["papers_table.py", "run", *SMALL, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        papers.script.app()
    assert stopped.value.code not in (0, None)
    assert lmms_eval.calls == [("unpatched", "gqa", "mme"), ("random-64", "gqa", "mme"), ("dart-64", "gqa", "mme")]
    lmms_eval.calls.clear()
    lmms_eval.interrupts.clear()
    code, output, _ = call("run", *SMALL, "--out", tmp_path)
    assert code == 0 and lmms_eval.calls == [("dart-64", "gqa", "mme"), ("dart-64-cut", "gqa", "mme")]
    assert "unpatched: already finished" in output and "papers_table.py table" in output
    lmms_eval.calls.clear()
    assert call("run", *SMALL, "--out", tmp_path)[0] == 0 and lmms_eval.calls == []


def test_a_failed_command_is_reported_and_the_others_run(
    papers: Any, call: Any, lmms_eval: Any, tmp_path: Path
) -> None:
    lmms_eval.fails |= {("random-64", "mme"), ("dart-64", "gqa"), ("dart-64", "mme")}
    code, output, error = call("run", *SMALL, "--out", tmp_path)
    assert code == 2 and len(lmms_eval.calls) == 4 and "papers_table.py table" not in output
    assert "2 commands did not finish" in error
    assert "random-64: no result for mme (exit code 0)" in error and "dart-64: no result for gqa, mme" in error
    assert (
        str(tmp_path / "dart-64/log.txt") in error and "--tasks gqa,mme" in (tmp_path / "dart-64/log.txt").read_text()
    )
    lmms_eval.calls.clear()
    lmms_eval.fails.clear()
    # Only missing results are measured again.
    assert call("run", *SMALL, "--out", tmp_path)[0] == 0
    assert lmms_eval.calls == [("random-64", "mme"), ("dart-64", "gqa", "mme")]


def test_another_task_of_a_benchmark_is_another_result(papers: Any, call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    arguments = ("--methods", "random", "--budgets", "64", "--out", tmp_path)
    call("run", *arguments, "--sets", "vqav2_val_lite")
    write_results(papers, tmp_path, "random-64", {"vqav2": 40.0}, tasks={"vqav2": "vqav2_val_lite"})
    notes = papers.outcomes.read_all(tmp_path, papers.settings.settings()).notes
    assert any("vqav2_val_lite, not" in note for note in notes)
    lmms_eval.calls.clear()
    call("run", *arguments, "--sets", "vqav2")
    assert ("random-64", "vqav2_val") in lmms_eval.calls
    # The full set has priority, even if its result is older.
    write_results(
        papers, tmp_path, "random-64", {"vqav2": 40.0}, tasks={"vqav2": "vqav2_val_lite"}, date="20270101_000000"
    )
    assert papers.outcomes.read_all(tmp_path, papers.settings.settings()).numbers["random-64"] == {"vqav2": 50.0}


def test_a_folder_that_cannot_be_written_is_an_error(call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, error = call("run", *SMALL, "--out", tmp_path / "file")
    assert code == 2 and "Cannot write to" in error


def test_split_runs_one_benchmark_at_a_time(call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    call("run", *SMALL, "--methods", "random", "--split", "--out", tmp_path)
    assert lmms_eval.calls == [("unpatched", "gqa"), ("unpatched", "mme"), ("random-64", "gqa"), ("random-64", "mme")]


def test_a_broken_result_is_measured_again(papers: Any, call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    call("run", *SMALL, "--methods", "random", "--out", tmp_path)
    lmms_eval.calls.clear()
    (path,) = (tmp_path / "random-64").rglob("*_results.json")
    truncate_file(path)
    code, _, error = call("run", *SMALL, "--methods", "random", "--out", tmp_path)
    assert lmms_eval.calls == [("random-64", "gqa", "mme")]
    assert code == 0, error
    assert path.with_name(f"{path.name}.broken").exists() and call("table", tmp_path)[0] == 0  # no files are lost


def test_dymu_without_thresholds_is_skipped_with_an_error(call: Any, lmms_eval: Any, tmp_path: Path) -> None:
    flags = (*"--methods dymu,random --budgets 64 --sets gqa --out".split(), tmp_path, "--thresholds", tmp_path / "t")
    code, _, error = call("run", *flags)
    assert code == 2 and f"dymu-64: {tmp_path / 't'} does not" in error and "`tokenprune fit dymu" in error
    assert [name for name, _ in lmms_eval.calls] == ["unpatched", "random-64"]
    (tmp_path / "t").write_bytes(b"")
    assert call("run", *flags)[0] == 0 and lmms_eval.calls[-1] == ("dymu-64", "gqa")


def test_running_without_lmms_eval_says_how_to_get_it(papers: Any, call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(papers.script.importlib.util, "find_spec", lambda name: None)
    code, _, error = call("run", "--out", tmp_path)
    assert code == 2 and "pip install 'tokenprune-bench[lmms-eval]'" in error and not list(tmp_path.iterdir())
    monkeypatch.setattr(papers.script.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(papers.script, "entry_points", lambda group: [])
    assert "does not find tokenprune" in call("run", "--out", tmp_path)[2]


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_is_current(papers: Any, call: Any, tmp_path: Path, monkeypatch: Any) -> None:
    text, stale = papers.script.PAGE.read_text(), tmp_path / "papers.md"
    assert call("page", "--check")[0] == 0, "run python benchmarks/experiments/papers_table.py page"
    assert all(f"[{row.source}]" in text for row in papers.published.published().rows)
    monkeypatch.setattr(papers.script, "PAGE", stale)
    # A cell of the table of results, and a cell of the table of budgets.
    for cell, wrong in (("| 99.2 (9) |", "| 98.2 (9) |"), ("206.5", "192.0")):
        assert cell in text
        stale.write_text(text.replace(cell, wrong))
        assert call("page", "--check")[0] == 1
        assert call("page")[0] == 0 and stale.read_text() == text


def test_averages_of_papers_equal_the_tokens_of_their_layers(papers: Any) -> None:
    """Expected values follow the lists in the authors' code; 9, 4 and 3 tokens are merged tokens, beyond SparseVLM's
    counts."""
    counts = papers.counts
    by_name = {(count.method, count.called): count for count in counts.COUNTS}
    assert len(by_name) == len(counts.COUNTS)
    assert by_name["dart", "64"].average == (2 * 576 + 30 * 68) / 32
    assert by_name["sparsevlm", "192"].average == (3 * 576 + 4 * 309 + 9 * 204 + 16 * 113) / 32
    assert by_name["sparsevlm", "64, SparseVLM+"].average == (3 * 576 + 4 * 66 + 9 * 34 + 16 * 20) / 32
    assert by_name["adaptinfer", "128"].average == (2 * 576 + 9 * 290 + 10 * 72 + 11 * 18) / 32
    assert by_name["tops", "64, both stages"].average == (12 * 128 + 12 * 64 + 8 * 16) / 32
    assert by_name["pyramiddrop", "270"].average == (8 * 576 + 8 * 288 + 8 * 144 + 8 * 72) / 32 == 270
    for count in counts.COUNTS:
        cuts = papers.settings.cuts_of(tokenprune.method(count.method), Budget(average_tokens=count.average))
        assert papers.settings.average(cuts) == pytest.approx(count.average, abs=0.5), count


def test_the_page_names_no_method_without_published_numbers(papers: Any) -> None:
    data = papers.published.published()
    settings = papers.settings.settings()
    absent = {candidate.method for candidate in settings if not data.get_rows(candidate.method)}
    assert absent and "random" in absent
    text = papers.script.written(papers.script.PAGE.read_text())
    assert not [name for name in absent if f"| `{name}` | [" in text]
    everything = "\n".join(papers.tables.to_markdown(table) for table in papers.tables.comparison())
    names = {candidate.name for candidate in settings}
    assert all(f"| `{name}` | 64 |" in everything for name in absent if f"{name}-64" in names)


def test_errors_are_ours(papers: Any) -> None:
    assert issubclass(papers.outcomes.BadResultsError, TokenPruneError)
    with pytest.raises(OptionError):
        papers.sets.chosen("")
