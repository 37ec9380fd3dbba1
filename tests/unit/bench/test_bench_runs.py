# SPDX-License-Identifier: Apache-2.0
"""Test runs that are saved, killed, continued and shared, and the comparison of methods."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tokenprune
from tokenprune.cli import app
from tokenprune.errors import OptionError
from tokenprune.statistics import Stats
from tokenprune_bench import results
from tokenprune_bench.errors import RunError
from tokenprune_bench.group import Group
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines
from tokenprune_bench.profiling import cost
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.run_folder import RunFolder
from tokenprune_bench.suite import Bench, BenchPlan
from tokenprune_demo.heldout import load_heldout

KINDS = ("colour", "count", "word")
FILES = [".lock", "config.json", "predictions.jsonl", "results.jsonl"]
CALLS = 12  # the unpatched model, three seeds of random, downsample and uniform, each with two batches


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    rows = [
        {"image": str(question.path), "question": question.question, "answer": question.answer, "kind": question.kind}
        for question in load_heldout(kinds=KINDS, limit=1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_arguments(data: Path, *more: object) -> list[str]:
    fixed = "bench --methods uniform --keep 0.25 --repeats 0 --batch-size 2 --device cpu --metric anls --details"
    if "--run" in more:
        fixed += " --samples 0"  # test_report_samples.py tests drawings
    return [*fixed.split(), "--data", str(data), *map(str, more)]


def invoke_bench(data: Path, *more: object) -> Result:
    return CliRunner(env={"COLUMNS": "220"}).invoke(app, build_arguments(data, *more))


def read_untimed(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file without dates and durations."""
    records = [record for record, _ in read_lines(path)]
    for record in records:
        record.pop("date", None)
        for name in ("cost", "stats"):
            record.get(name, {}).pop("overhead_ms", None)
    return records


@pytest.fixture(scope="module")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = invoke_bench(data, "--run", folder)
    assert result.exit_code == 0, result.output
    return folder, result.stdout


class Killed(BaseException):
    """An exception like a signal, which no handler catches."""


def kill_after(monkeypatch: pytest.MonkeyPatch, calls: int | None) -> list[int]:
    """Kill the run after a number of model calls. Return a list with an item per call."""
    generate, done = Model.generate, []

    def limited(self: Model, inputs: dict[str, Any], **options: Any) -> list[str]:
        if calls is not None and len(done) == calls:
            raise Killed
        done.append(1)
        return generate(self, inputs, **options)

    monkeypatch.setattr(Model, "generate", limited)
    return done


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_run_keeps_config_predictions_and_results(data: Path, unbroken: tuple[Path, str]) -> None:
    folder, printed = unbroken
    assert sorted(file.name for file in folder.iterdir()) == FILES
    config = json.loads((folder / "config.json").read_text())
    assert (config["metric"], config["keeps"], config["data"]["questions"]) == ("anls", [0.25], 3)
    assert config["methods"] == ["random", "downsample", "uniform"]
    assert config["versions"]["tokenprune"] == tokenprune.__version__
    assert config["fingerprint"].startswith("float32:")
    lines = read_untimed(folder / "predictions.jsonl")
    assert [(line["method"], line["keep"], line["seed"], line["question"]) for line in lines] == [
        *(("unpatched", 1.0, None, question) for question in range(3)),
        *(("random", 0.25, seed, question) for seed in range(3) for question in range(3)),
        *(("downsample", 0.25, None, question) for question in range(3)),
        *(("uniform", 0.25, None, question) for question in range(3)),
    ]
    header, base, *_, uniform = read_untimed(folder / "results.jsonl")
    assert header["kinds"] == sorted(KINDS) and header["metric"] == "anls"
    assert [line["score"] for line in lines[-3:]] == uniform["scores"][0]
    assert [line["score"] for line in lines[:3]] == base["scores"][0]
    assert "3 questions of mine.jsonl" in printed and "ANLS %" in printed and "Against the baselines" in printed
    assert str(data.parent) not in (folder / "results.jsonl").read_text() + (folder / "config.json").read_text()
    again = CliRunner(env={"COLUMNS": "220"}).invoke(app, ["report", str(folder), "--details"])
    assert again.stdout == printed


@pytest.mark.parametrize("calls", [0, 3, 7, 11])
def test_a_killed_run_goes_on_and_ends_like_an_unbroken_one(
    calls: int, data: Path, unbroken: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, calls)
        with pytest.raises(Killed):
            invoke_bench(data, "--run", tmp_path / "run")
    for name in ("predictions.jsonl", "results.jsonl"):  # the process was killed while writing a line
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"method": "unpatched", "keep": 1.0, "se')
    done = kill_after(monkeypatch, None)
    result = invoke_bench(data, "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert len(done) == CALLS - calls  # finished batches are not repeated
    assert result.stdout == unbroken[1]
    assert (tmp_path / "run/config.json").read_text() == (unbroken[0] / "config.json").read_text()
    for name in ("predictions.jsonl", "results.jsonl"):
        assert read_untimed(tmp_path / "run" / name) == read_untimed(unbroken[0] / name)


def test_a_batch_that_was_torn_is_asked_again(
    data: Path, unbroken: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text((unbroken[0] / "config.json").read_text())
    lines = (unbroken[0] / "predictions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "predictions.jsonl").write_text("".join(lines[:4]))  # a single line of random's first batch
    # A batch of downsample, written by another process.
    (tmp_path / "predictions.1.jsonl").write_text("".join(lines[12:14]))
    done = kill_after(monkeypatch, None)
    assert invoke_bench(data, "--run", tmp_path).stdout == unbroken[1]
    assert len(done) == CALLS - 3
    assert read_untimed(tmp_path / "predictions.jsonl") == read_untimed(unbroken[0] / "predictions.jsonl")
    assert not (tmp_path / "predictions.1.jsonl").exists()


def test_a_finished_run_asks_nothing(data: Path, unbroken: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = (unbroken[0] / "results.jsonl").read_text()
    kill_after(monkeypatch, 0)
    assert invoke_bench(data, "--run", unbroken[0]).stdout == unbroken[1]
    assert (unbroken[0] / "results.jsonl").read_text() == before


def test_another_config_in_the_folder_is_refused(data: Path, unbroken: tuple[Path, str], tmp_path: Path) -> None:
    before = (unbroken[0] / "predictions.jsonl").read_text()
    for more, message in (
        (("--keep", "0.5"), "keeps [0.25], but this run has [0.5]"),
        (("--metric", "exact"), 'metric "anls", but this run has "exact"'),
        (("--limit", "2"), '"questions": 2'),
    ):
        result = invoke_bench(data, "--run", unbroken[0], *more)
        assert result.exit_code == 2
        assert message in result.stderr and "another folder" in result.stderr
    assert (unbroken[0] / "predictions.jsonl").read_text() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="not empty and not a run folder"), RunFolder(tmp_path, {}):
        pass
    with pytest.raises(RunError, match="Cannot use"), RunFolder(tmp_path / "notes.txt", {}):
        pass
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="damaged"), RunFolder(tmp_path, {}):
        pass


def test_a_damaged_line_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n{"b"\n{"c": 3}\n')
    with pytest.raises(RunError, match=r"Line 2 of .* is damaged"):
        read_lines(path)
    path.write_text('{"a": 1}\n{"b": 2}')  # complete, but without a line end
    assert read_lines(path) == [({"a": 1}, 9)]
    with JsonLinesWriter(path, 9) as lines:
        lines.write({"c": "ä"})
    assert [record for record, _ in read_lines(path)] == [{"a": 1}, {"c": "ä"}]


def test_a_full_disk_ends_the_run_and_keeps_what_is_done(
    data: Path, unbroken: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((unbroken[0] / "predictions.jsonl").stat().st_size // 2, hard))
    try:
        result = invoke_bench(data, "--run", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.exit_code == 2
    assert "Cannot write" in result.stderr and "Earlier records are kept" in result.stderr
    assert len(read_untimed(tmp_path / "run/results.jsonl")) >= 2  # the header and the unpatched model
    done = kill_after(monkeypatch, None)
    assert invoke_bench(data, "--run", tmp_path / "run").stdout == unbroken[1]
    assert 0 < len(done) < CALLS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system lacks /dev/full")
def test_a_full_disk_is_reported_for_json_output(data: Path) -> None:
    result = invoke_bench(data, "--json", "/dev/full")
    assert result.exit_code == 2
    assert "Cannot write /dev/full: No space left on device" in result.stderr


def test_a_placeholder_in_a_question_ends_the_run_before_it_begins(data: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[1]["question"] = "<image>\n" + rows[1]["question"]
    questions_path = tmp_path / "mine.jsonl"
    questions_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = invoke_bench(questions_path, "--run", tmp_path / "run")
    assert result.exit_code == 2
    assert "line 2: its question contains the placeholder '<image>'" in result.stderr and "--skip-bad" in result.stderr
    assert not (tmp_path / "run").exists()
    # With --skip-bad it is left out like other bad rows, and so is a video if the model does not support videos.
    questions_path.write_text(questions_path.read_text() + '{"image": "none.png", "question": "q", "answer": "a"}\n')
    result = invoke_bench(questions_path, "--skip-bad", "--run", tmp_path / "run")
    assert result.exit_code == 0, result.output
    skipped = [line for line in result.stderr.splitlines() if line.startswith("skipped: ")]
    assert [line[:17] for line in skipped] == ["skipped: line 2: ", "skipped: line 4: "] and "'<image>'" in skipped[0]
    assert "Skipped in the data: line 2: " in result.stdout and "and 1 more" in result.stdout
    header = read_untimed(tmp_path / "run/results.jsonl")[0]
    assert header["data"]["questions"] == len(rows) - 1 == len(header["kind_of_question"])
    # Without any valid question there is an error.
    questions_path.write_text(json.dumps(rows[1]) + "\n")
    result = invoke_bench(questions_path, "--skip-bad")
    assert result.exit_code == 2 and "has no questions: all 1 rows are bad, line 1: " in result.stderr


# -- processes -------------------------------------------------------------------------------------------------------


def start_two_processes(data: Path, run: Path) -> list[subprocess.Popen[str]]:
    """Start a run over gloo, as `accelerate launch --num_processes 2 -m tokenprune bench` does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(
        [str(Path(tokenprune.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {"PYTHONPATH": path, "COLUMNS": "220", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tokenprune", *build_arguments(data, "--run", run)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return [subprocess.Popen(command, env=os.environ | environment | {"RANK": str(rank)}, **pipes) for rank in range(2)]


def test_two_processes_equal_one_process(data: Path, unbroken: tuple[Path, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    leader, killed = start_two_processes(data, run)
    end = time.monotonic() + 120
    while not (run / "config.json").exists():
        assert time.monotonic() < end and killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    killed.kill()
    killed.communicate()
    _, error = leader.communicate(timeout=120)
    assert leader.returncode != 0 and "Another process of this run has ended" in error

    processes = start_two_processes(data, run)
    (first, error), (second, _) = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], error
    assert first == unbroken[1]
    assert second == ""
    for name in ("predictions.jsonl", "results.jsonl"):
        assert read_untimed(run / name) == read_untimed(unbroken[0] / name)
    assert sorted(file.name for file in run.iterdir()) == FILES


def test_more_processes_than_batches_are_refused() -> None:
    with pytest.raises(OptionError, match=r"3 processes, but only 1 batches .* smaller --batch-size"):
        Bench(load_model(device="cpu"), BenchPlan(images=1), group=Group(0, 3))


def test_more_than_ten_kinds_are_told_apart() -> None:
    kinds = [f"{index:02}" for index in range(12)]
    questions = [
        SimpleNamespace(kind=kind, question="what is it?", is_video=False) for kind in (*kinds, "11", "01", "00")
    ]
    bench = Bench(load_model(device="cpu"), BenchPlan(repeats=0), questions=questions)
    header = bench.header()
    assert header["kinds"] == kinds
    assert header["kind_of_question"] == [*map(str, range(12)), "11", "1", "0"]
    stats = {"visual_tokens_in": 1, "visual_tokens_out": 1, "visual_tokens_average": 1.0}
    right = "0" * 11 + "1" + "100"  # both questions of kind 11
    record = dict(record="result", method="unpatched", keep=1.0, site=None, right=[right], questions=15, stats=stats)
    (row,) = results.summarise([header, record]).rows
    assert {kind: share.value for kind, share in row.kinds.items()} == dict.fromkeys(kinds, 0.0) | {"11": 1.0}
    assert (
        Bench(load_model(device="cpu"), BenchPlan(), questions=questions[:10]).header()["kind_of_question"]
        == "0123456789"
    )


def test_costs_of_batches_are_summed() -> None:
    def stats(times: int) -> Stats:
        counts = {"kv_bytes": 10 * times, "kv_bytes_full": 20 * times, "overhead_ms": 0.5 * times}
        flops = {"prefill_flops": 1.5 * times, "prefill_flops_full": 3.0 * times}
        return Stats(4 * times, 1 * times, [4 * times, times], **counts, **flops)

    total = stats(1) + stats(10)
    assert total == replace(stats(11), keep_ratio=0.25, prefill_flops_ratio=0.5)
    assert Stats(**json.loads(json.dumps(stats(11).sums()))) == stats(11)
    assert (Stats() + stats(1)).sums() == stats(1).sums() and Stats() + Stats() == Stats()
    # A value that one engine does not report is unknown for all; so are FLOPs shares without a model config.
    unknown = Stats(4, 1, [1], overhead_ms=None)
    assert (unknown + stats(1)).overhead_ms is None and "overhead unknown" in repr(unknown)
    assert cost.build_cost_record(unknown, unknown)["prefill_flops_ratio"] is None
    record = cost.build_cost_record(stats(1), stats(10))
    assert record == {
        "visual_tokens_in": 40, "visual_tokens_out": 1, "visual_tokens_per_layer": [4, 1], "kv_bytes": 10,
        "kv_bytes_full": 100, "overhead_ms": 0.5, "visual_tokens_average": 2.5, "keep_ratio": 1 / 40,
        "prefill_flops_ratio": 0.1,
    }  # fmt: skip
