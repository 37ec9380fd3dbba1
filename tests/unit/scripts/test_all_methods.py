# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/all_methods.py: all methods at equal cost, its rows and its page."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tokenprune
from tokenprune_bench.errors import RunError
from tokenprune_bench.recommend.advice import load_advice
from tokenprune_bench.results import read_records
from tokenprune_bench.tuning.candidates import build_grid, load_comparison_methods

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("all_methods")


@pytest.fixture(scope="module")
def call(script: Any) -> Callable[..., int]:
    """Return a function that runs the script with arguments and returns its exit code."""

    def run(*arguments: Any) -> int:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", ["all_methods.py", *map(str, arguments)])
            script.app()
        return ended.value.code or 0

    return run


ASK = ["ask", "--model", "demo_vlm", "--questions", 1, "--device", "cpu", "--targets", "0.5,0.25"]


@pytest.fixture(scope="module")
def rows(call: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "all_methods-tiny.jsonl"
    assert call(*ASK, "--methods", "fastv,dynres", "--out", path) == 0
    return path


def test_each_row_has_its_setting_and_its_cost(rows: Path) -> None:
    header, unpatched, *others = read_records(rows)
    assert header["plan"]["equal_cost"] and unpatched["method"] == "unpatched"
    assert [(record["method"], record["keep"], record["record"]) for record in others] == [
        ("random", 0.5, "result"), ("random", 0.25, "result"), ("downsample", 0.5, "result"),
        ("downsample", 0.25, "result"), ("fastv", 0.5, "result"), ("fastv", 0.25, "skipped"),
        ("dynres", 0.5, "skipped"), ("dynres", 0.25, "skipped"),
    ]  # fmt: skip
    for record in (unpatched, *others):
        if record["record"] == "result":
            right = "".join(record["right"])
            assert record["accuracy"] == right.count("1") / len(right) == sum(record["correct"].values()) / len(right)
            low, high = record["interval"]
            assert low <= record["accuracy"] <= high and record["load"] >= 0
    fastv = others[4]
    assert fastv["setting"] == {"method": "fastv", "keep": {"average_share": 0.5}}
    assert fastv["stats"]["visual_tokens_average"] == 8 * 128


def test_existing_rows_are_not_measured_again(
    rows: Path, script: Any, call: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "more.jsonl"
    path.write_bytes(rows.read_bytes() + b'{"record": "result", "meth')  # an interrupted run
    calls = []
    pass_of = script.Bench._pass
    monkeypatch.setattr(
        script.Bench, "_pass", lambda self, one_pass, *more: calls.append(one_pass) or pass_of(self, one_pass, *more)
    )
    assert call(*ASK, "--methods", "fastv,divprune", "--out", path) == 0
    assert [(one_pass.method, one_pass.keep) for one_pass in calls] == [
        ("unpatched", 1.0), ("divprune", 0.5), ("divprune", 0.25)
    ]  # fmt: skip
    lines = path.read_text().splitlines()
    assert lines[:-2] == rows.read_text().splitlines()
    assert [json.loads(line)["method"] for line in lines[-2:]] == ["divprune"] * 2


def test_rows_of_other_questions_are_not_mixed(rows: Path, call: Callable[..., int], capsys: Any) -> None:
    before, two = rows.read_bytes(), ["--questions", 2, "--device", "cpu", "--methods", "fastv"]
    assert call("ask", "--model", "demo_vlm", *two, "--out", rows) == 2
    assert "has other questions. Pass the same options" in " ".join(capsys.readouterr().err.split())
    assert rows.read_bytes() == before


def test_rows_of_another_dtype_are_not_mixed(rows: Path, script: Any) -> None:
    header = read_records(rows)[0]
    other = header | {"environment": header["environment"] | {"dtype": "bfloat16"}}
    with pytest.raises(RunError, match=r"has dtype float32, not bfloat16\. Pass the same options"):
        script.Rows(rows, other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "llava"],
            "'llava' is not a shipped model. Choose from: demo_vlm, demo_qwen, demo_video, demo_smol",
        ),
        (["--methods", "fastvv"], "did you mean 'fastv'"),
        (["--targets", "64"], "shares of the visual tokens"),
        (["--targets", "1.5"], "keep=1.5 is not a valid share"),
    ],
)
def test_invalid_arguments_are_refused(
    call: Callable[..., int], capsys: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert call("ask", *arguments, "--out", tmp_path / "none.jsonl") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none.jsonl").exists()


def test_a_section_has_accuracy_rank_and_unreached_targets(rows: Path, script: Any) -> None:
    text = script.section(rows)
    (line,) = (row for row in text.splitlines() if row.startswith("| `fastv` | ") and "average_share" not in row)
    accuracy = next(record for record in read_records(rows) if record.get("method") == "fastv")["accuracy"]
    assert line.startswith(f"| `fastv` |  | {100 * accuracy:.1f} [")  # the smaller target is not reached
    # dynres reaches neither target.
    assert "- `dynres`: the number of tokens depends on the image's content" in text.splitlines()
    assert "- `fastv` at 25 %: cannot be reached by a cut at layer 2 of 6" in text.splitlines()
    assert f"[{rows.name}]" in text  # the file with the settings
    assert "| method |" not in script.section(rows, with_table=False) and "Not reached" not in script.section(
        rows, False
    )
    assert "Kendall" not in text  # only one method is published at 0.25, which gives no order


def test_a_target_that_not_all_methods_were_asked_at_is_not_shown(rows: Path, script: Any) -> None:
    records = read_records(rows)
    assert script.finished_targets(records) == [0.25, 0.5]
    fewer = [record for record in records if (record.get("method"), record.get("keep")) != ("dynres", 0.25)]
    assert script.finished_targets(fewer) == [0.5]


def test_every_nth_image_is_asked_about(call: Callable[..., int], tmp_path: Path, script: Any) -> None:
    path = tmp_path / "all_methods-spread.jsonl"
    flags = ["ask", "--model", "demo_vlm", "--questions", 4, "--every", 3, "--targets", "0.5", "--methods", "uniform"]
    assert call(*flags, "--dtype", "bfloat16", "--threads", 1, "--device", "cpu", "--out", path) == 0
    header = read_records(path)[0]
    assert sorted(set(header["image_of_question"])) == [0, 3] and header["environment"]["dtype"] == "bfloat16"
    assert "--questions 4 --every 3 --dtype bfloat16`" in script.section(path)


def test_marks_are_corrected_for_the_number_of_methods(script: Any) -> None:
    """Eight wins without a loss have p = .004: significant for one method, but not for the weakest of twenty."""
    answers = {("random", 0.25): "0" * 20, ("best", 0.25): "1" * 20, ("close", 0.25): "1" * 8 + "0" * 12}
    equal = {(f"m{n}", 0.25): "0" * 20 for n in range(20)}

    def marks(selected: dict) -> dict:
        results = {key: SimpleNamespace(right=[right]) for key, right in selected.items()}
        return script.marks_at(SimpleNamespace(answers=results), [name for name, _ in selected], 0.25)

    assert marks(answers) == {"random": [], "best": [], "close": []}
    assert marks(answers | equal)["close"] == ["rnd"] and marks(answers | equal)["best"] == []


def test_equals_share_the_better_rank(script: Any) -> None:
    assert script.ranks({"a": 0.9, "b": 0.7, "c": 0.9, "d": 0.1}) == {"a": 1, "b": 3, "c": 1, "d": 4}


def test_the_page_and_the_methods_for_comparison_are_current(script: Any) -> None:
    text, advice = script.PAGE.read_text(), "run python benchmarks/experiments/all_methods.py page"
    assert script.written(text) == text and script.COMPARISON.read_text() == script.for_comparison(), advice


def test_methods_for_comparison_follow_from_the_rows(script: Any) -> None:
    comparison_methods = load_comparison_methods()
    assert comparison_methods and not comparison_methods.keys() & {advice.method for advice in load_advice().values()}
    searched = {method.name for setting in build_grid(keeps=[0.5]) for method in setting.methods}
    unfitted = {name for name in tokenprune.available_methods() if tokenprune.method(name).default_equals}
    assert unfitted and searched == set(tokenprune.available_methods()) - comparison_methods.keys() - unfitted
    (setting,) = build_grid(["fastv"], [0.5])
    assert "fastv" in comparison_methods and [method.name for method in setting.methods] == ["fastv"]


def test_a_method_that_beats_both_at_one_budget_is_not_for_comparison(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = {"fastv": [["rnd", "uni"], ["uni"], ["rnd"]], "vscan": [["rnd", "uni"], ["down"], ["rnd", "uni"]]}
    rows = [SimpleNamespace(method="unpatched")] + [SimpleNamespace(method=name) for name in marks]
    results = SimpleNamespace(rows=rows, answers={(name, target_index) for name in marks for target_index in range(3)})
    monkeypatch.setattr(script, "MODELS", ("demo_smol",))
    monkeypatch.setattr(script, "read_records", lambda path: [])
    monkeypatch.setattr(script, "summarise", lambda records: results)
    monkeypatch.setattr(script, "finished_targets", lambda records: [0, 1, 2])
    monkeypatch.setattr(
        script, "marks_at", lambda results, names, target: {name: marks[name][target] for name in names}
    )
    assert json.loads(script.for_comparison())["methods"] == {"fastv": "random at 1, uniform at 1 of 3 settings"}
