# SPDX-License-Identifier: Apache-2.0
"""Test the benchmark on drawn videos and views: its questions, controls, skipped methods, tables, and continued
runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from each import each
from tests.unit.api.test_cli import call, refused
from tiny_video_model import write_tiny_video_model
from tokenprune_bench import results, tables
from tokenprune_bench.plan import BenchPlan, Pass
from tokenprune_bench.profiling.model import Model, load_model
from tokenprune_bench.report.warnings import find_warnings
from tokenprune_bench.run_folder import RunFolder, config_of
from tokenprune_bench.suite import Bench
from tokenprune_demo.drawn_sets import draw_set


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_video_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def subject(folder: Path) -> Model:
    model = load_model(str(folder), device="cpu", suffix="")
    model.max_new_tokens = 1
    return model


def build_plan(*methods: str, **more: Any) -> BenchPlan:
    return BenchPlan(methods, (0.25,), repeats=0, seeds=(0,), **more)


def test_limit_counts_questions_and_images_counts_images(tmp_path: Path) -> None:

    def questions(*arguments: object) -> int:
        out = tmp_path / "records.jsonl"
        fixed = ("bench", "--methods", "uniform", "--keep", 0.25, "--repeats", 0, "--device", "cpu", "--json", out)
        call(*fixed, *arguments)
        (unpatched,) = (
            record for record in map(json.loads, out.read_text().splitlines()) if record.get("method") == "unpatched"
        )
        return unpatched["questions"]

    assert questions("--limit", 5) == 5
    assert questions("--images", 2) > 10
    assert questions("--images", 1, "--limit", 3) == 3
    assert questions("--model", "demo_qwen", "--set", "documents", "--limit", 3) == 3
    error = refused("bench", "--data", tmp_path / "rows.jsonl", "--images", 2)
    assert "With --data pass --limit" in error


def test_a_shortened_set_keeps_its_controls_and_the_kinds_that_are_asked() -> None:
    full_set = draw_set("videos", 2)
    short_set = full_set.first(3)
    assert short_set.questions == full_set.questions[:3] and full_set.first(0) is full_set
    assert set(short_set.kinds) == {question.kind for question in short_set.questions}
    assert [control_set.questions for control_set in short_set.controls] == [
        control_set.questions[:3] for control_set in full_set.controls
    ]
    assert all(set(control_set.chance) <= set(short_set.kinds) for control_set in short_set.controls)


def test_videos_are_asked_by_kind_with_controls(subject: Model, tmp_path: Path) -> None:
    question_set, calls = draw_set("videos", 1), []
    video_inputs = Model.video_inputs

    def spy(self: Model, frames: Any, question: str) -> dict[str, Any]:
        calls.append((question, [frame.tobytes() for frame in frames]))
        return video_inputs(self, frames, question)

    bench_plan = build_plan("divprune", "pevlm", "view_select", "escalate")
    config = config_of(subject, bench_plan, "exact", {})

    def run() -> list[dict[str, Any]]:
        with RunFolder(tmp_path, config) as run_folder:
            bench = Bench(subject, bench_plan, questions=question_set, folder=run_folder)
            return list(bench.records())

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Model, "video_inputs", spy)
        records = run()
        frames = dict(calls[:8])
        first, mixed = calls[8:16], calls[16:24]
        assert all(seen_frames == frames[question][:1] * 8 for question, seen_frames in first)
        assert all(
            seen_frames != frames[question] and sorted(seen_frames) == sorted(frames[question])
            for question, seen_frames in mixed
        )
        calls.clear()
        assert run() == json.loads(json.dumps(records)) and not calls  # all results were saved
    header, unpatched, *records_after = records
    assert header["kinds"] == list(question_set.kinds) and set(header["group_of_question"]) == {"still ground"}
    assert [record["control"] for record in records_after[:2]] == ["first frame only", "shuffled frames"]
    by_method = {(record["method"], record["record"]): record for record in records_after[2:]}
    assert set(by_method) == {
        ("random", "result"), ("downsample", "result"), ("divprune", "result"), ("pevlm", "result"),
        ("view_select", "skipped"), ("escalate", "skipped"),
    }  # fmt: skip
    assert "have one image each" in by_method["view_select", "skipped"]["reason"]
    assert "supports images only" in by_method["escalate", "skipped"]["reason"]
    assert by_method["pevlm", "result"]["keep"] == 1.0 and "evidence" not in by_method["pevlm", "result"]
    assert "evidence" not in unpatched and "evidence" not in by_method["downsample", "result"]
    (recall,) = by_method["divprune", "result"]["evidence"]
    assert len(recall) == 8 and all(0 <= share <= 1 for share in recall)

    summary = results.summarise(records)
    titles = [table.title for table in tables.build_tables(summary)]
    assert titles[1:] == [
        "Accuracy by kind of question", "Accuracy by ground", "Evidence kept",
        "Controls, which must fail", "Against the baselines",
    ]  # fmt: skip
    assert "evidence" in tables.build_tables(summary)[0].columns
    assert not [warning for warning in find_warnings(summary) if warning.code in ("unfinished", "control-passed")]


def test_pevlm_reads_drawn_videos_in_blocks(subject: Model) -> None:
    """Its default sizes would not split such a short video."""
    import tokenprune

    options = draw_set("videos", 1).options["pevlm"]
    question = draw_set("videos", 1).questions[0]
    with tokenprune.patched(subject.model, "pevlm", **options):
        subject.generate(subject.video_inputs(question.video, question.question))
        assert tokenprune.stats(subject.model).attention_blocks == 3


def test_views_are_asked_with_their_labels(subject: Model) -> None:
    question_set = draw_set("views", 2)
    header, unpatched, *records_after = Bench(
        subject, build_plan("view_select", "escalate", "divprune", "pevlm", several=True), questions=question_set
    ).records()
    by_method = {record["method"]: record for record in records_after}
    assert header["options"] == question_set.options and unpatched["questions"] == 8
    assert by_method["pevlm"]["record"] == "skipped" and "works on videos" in by_method["pevlm"]["reason"]
    # A quarter of six images is one: four of the eight questions name a view, and the others get the first.
    tokens = {
        name: record["stats"]["visual_tokens_out"] for name, record in by_method.items() if record["record"] == "result"
    }
    assert tokens["view_select"] == unpatched["stats"]["visual_tokens_out"] / 6
    # Without a limit, questions that name a view keep one of six images, and others keep all: `views` has the names.
    unlimited = BenchPlan(("view_select",), (1.0,), repeats=0, seeds=(0,), several=True)
    *_, unlimited = Bench(subject, unlimited, questions=draw_set("views", 1)).records()
    assert unlimited["stats"]["visual_tokens_out"] * 24 == unlimited["stats"]["visual_tokens_in"] * (1 + 1 + 6 + 6)
    assert by_method["escalate"]["record"] == "result" and by_method["escalate"]["site"] is None
    assert "timing" not in by_method["escalate"] and tokens["escalate"] > 0
    assert by_method["divprune"]["evidence"][0] and "evidence" not in by_method["view_select"]
    assert "view_select" in BenchPlan((), several=True).methods and "view_select" not in BenchPlan(()).methods


def test_video_methods_are_skipped_on_images(subject: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenprune.methods.pre_llm.divprune import DivPrune

    monkeypatch.setattr(DivPrune, "needs", frozenset({"frames"}))
    *_, record = Bench(subject, build_plan("divprune"), questions=draw_set("views", 1)).records()
    assert record["record"] == "skipped" and "works on videos" in record["reason"]


def build_control(right: str, chance: float = 0.25) -> dict[str, Any]:
    return dict(
        record="control", method="unpatched, first frame only", keep=1.0, control="first frame only",
        chance={"colour": chance}, right=[right], questions=20,
    )  # fmt: skip


@pytest.mark.parametrize(("right", "passed"), [("10" * 10, True), ("1000" * 5, False), ("0" * 20, False)])
def test_a_passed_control_is_reported(right: str, passed: bool) -> None:
    from tests.unit.bench.test_bench import HEADER, RECORDS

    summary = results.summarise([HEADER, RECORDS[1], build_control(right), *RECORDS[2:]])
    assert [control.passed for control in summary.controls] == [["colour"] if passed else []]
    warned = [warning for warning in find_warnings(summary) if warning.code == "control-passed"]
    assert len(warned) == passed
    (table,) = (table for table in tables.build_tables(summary) if table.title.startswith("Controls"))
    assert table.rows[0][1].bad is passed and "chance 25" in table.rows[0][1].text
    if passed:
        assert warned[0].items == ("first frame only: colour 100 %, chance 25 %",)


def test_controls_are_passes_of_the_unpatched_model() -> None:
    assert Pass.for_control("shuffled frames").setting is None
    assert Pass.for_control("shuffled frames").method != "unpatched"


def test_the_command_reports_only_evidence(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "evidence.jsonl"
    result = call(
        "bench", "--model", folder, "--set", "videos", "--images", 1, "--methods", "uniform", "--keep", "0.25",
        "--evidence", "--details", "--device", "cpu", "--json", out, "--run", tmp_path / "run",
    )  # fmt: skip
    assert "Evidence kept" in result.output and "does not generate answers" in result.output.replace("\n", " ")
    assert "Accuracy" not in result.output and "Controls" not in result.output and "Not shown" not in result.output
    again = call("report", out, "--details")
    assert "Evidence kept" in again.output and "Accuracy" not in again.output


@each(
    ("arguments", "message"),
    [
        (("--set", "films"), "is none of images, videos, small-videos, views"),
        (("--set", "videos", "--data", "x.jsonl"), "leave out --data"),
        (("--evidence", "--data", "x.jsonl"), "leave out --data"),
        (("--evidence", "--html", "x.html"), "asks for none"),
        (("--evidence", "--backend", "vllm"), "leave out --backend"),
        (("--set", "videos", "--images", "1", "--device", "cpu"), "this model does not support videos"),
    ],
)
def test_conflicting_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in " ".join(refused("bench", *arguments).split())
