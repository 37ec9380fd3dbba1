# SPDX-License-Identifier: Apache-2.0
"""The bench on drawn videos and views: what is asked, controls, what is skipped and why, tables, going on."""

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
    made = load_model(str(folder), device="cpu", suffix="")
    made.max_new_tokens = 1
    return made


def plan(*methods: str, **more: Any) -> BenchPlan:
    return BenchPlan(methods, (0.25,), repeats=0, seeds=(0,), **more)


def test_limit_counts_questions_and_images_counts_images(tmp_path: Path) -> None:

    def questions(*arguments: object) -> int:
        out = tmp_path / "records.jsonl"
        fixed = ("bench", "--methods", "uniform", "--keep", 0.25, "--repeats", 0, "--device", "cpu", "--json", out)
        call(*fixed, *arguments)
        (unpatched,) = (
            one for one in map(json.loads, out.read_text().splitlines()) if one.get("method") == "unpatched"
        )
        return unpatched["questions"]

    assert questions("--limit", 5) == 5
    assert questions("--images", 2) > 10
    assert questions("--images", 1, "--limit", 3) == 3
    assert questions("--model", "demo_qwen", "--set", "documents", "--limit", 3) == 3
    said = refused("bench", "--data", tmp_path / "rows.jsonl", "--images", 2)
    assert "With --data pass --limit" in said


def test_a_shortened_set_keeps_its_controls_and_the_kinds_that_are_asked() -> None:
    whole = draw_set("videos", 2)
    short = whole.first(3)
    assert short.questions == whole.questions[:3] and whole.first(0) is whole
    assert set(short.kinds) == {one.kind for one in short.questions}
    assert [one.questions for one in short.controls] == [one.questions[:3] for one in whole.controls]
    assert all(set(one.chance) <= set(short.kinds) for one in short.controls)


def test_videos_are_asked_by_kind_with_controls(subject: Model, tmp_path: Path) -> None:
    asked, shown = draw_set("videos", 1), []
    video_inputs = Model.video_inputs

    def spy(self: Model, frames: Any, question: str) -> dict[str, Any]:
        shown.append((question, [frame.tobytes() for frame in frames]))
        return video_inputs(self, frames, question)

    wanted = plan("divprune", "pevlm", "view_select", "escalate")
    config = config_of(subject, wanted, "exact", {})

    def run() -> list[dict[str, Any]]:
        with RunFolder(tmp_path, config) as kept:
            bench = Bench(subject, wanted, questions=asked, folder=kept)
            return list(bench.records())

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(Model, "video_inputs", spy)
        records = run()
        frames = dict(shown[:8])
        first, mixed = shown[8:16], shown[16:24]
        assert all(seen == frames[question][:1] * 8 for question, seen in first)
        assert all(seen != frames[question] and sorted(seen) == sorted(frames[question]) for question, seen in mixed)
        shown.clear()
        assert run() == json.loads(json.dumps(records)) and not shown  # all of it was kept
    header, unpatched, *rest = records
    assert header["kinds"] == list(asked.kinds) and set(header["group_of_question"]) == {"still ground"}
    assert [one["control"] for one in rest[:2]] == ["first frame only", "shuffled frames"]
    made = {(one["method"], one["record"]): one for one in rest[2:]}
    assert set(made) == {
        ("random", "result"), ("downsample", "result"), ("divprune", "result"), ("pevlm", "result"),
        ("view_select", "skipped"), ("escalate", "skipped"),
    }  # fmt: skip
    assert "have one image each" in made["view_select", "skipped"]["reason"]
    assert "supports images only" in made["escalate", "skipped"]["reason"]
    assert made["pevlm", "result"]["keep"] == 1.0 and "evidence" not in made["pevlm", "result"]
    assert "evidence" not in unpatched and "evidence" not in made["downsample", "result"]
    (told,) = made["divprune", "result"]["evidence"]
    assert len(told) == 8 and all(0 <= one <= 1 for one in told)

    summary = results.summarise(records)
    titles = [table.title for table in tables.build_tables(summary)]
    assert titles[1:] == [
        "Accuracy by kind of question", "Accuracy by ground", "Evidence kept",
        "Controls, which must fail", "Against the baselines",
    ]  # fmt: skip
    assert "evidence" in tables.build_tables(summary)[0].columns
    assert not [one for one in find_warnings(summary) if one.code in ("unfinished", "control-passed")]


def test_pevlm_reads_drawn_videos_in_blocks(subject: Model) -> None:
    """With its own sizes it would leave so short a video as it is."""
    import tokenprune

    options = draw_set("videos", 1).options["pevlm"]
    question = draw_set("videos", 1).questions[0]
    with tokenprune.patched(subject.model, "pevlm", **options):
        subject.generate(subject.video_inputs(question.video, question.question))
        assert tokenprune.stats(subject.model).attention_blocks == 3


def test_views_are_asked_with_their_labels(subject: Model) -> None:
    asked = draw_set("views", 2)
    header, unpatched, *rest = Bench(
        subject, plan("view_select", "escalate", "divprune", "pevlm", several=True), questions=asked
    ).records()
    made = {one["method"]: one for one in rest}
    assert header["options"] == asked.options and unpatched["questions"] == 8
    assert made["pevlm"]["record"] == "skipped" and "works on videos" in made["pevlm"]["reason"]
    # A quarter of six images is one: four of the eight questions name a view, the others get the first.
    tokens = {name: one["stats"]["visual_tokens_out"] for name, one in made.items() if one["record"] == "result"}
    assert tokens["view_select"] == unpatched["stats"]["visual_tokens_out"] / 6
    # Without a bound, by name or number one of six images, else all: it got the names as `views`.
    free = BenchPlan(("view_select",), (1.0,), repeats=0, seeds=(0,), several=True)
    *_, free = Bench(subject, free, questions=draw_set("views", 1)).records()
    assert free["stats"]["visual_tokens_out"] * 24 == free["stats"]["visual_tokens_in"] * (1 + 1 + 6 + 6)
    assert made["escalate"]["record"] == "result" and made["escalate"]["site"] is None
    assert "timing" not in made["escalate"] and tokens["escalate"] > 0
    assert made["divprune"]["evidence"][0] and "evidence" not in made["view_select"]
    assert "view_select" in BenchPlan((), several=True).methods and "view_select" not in BenchPlan(()).methods


def test_video_methods_are_skipped_on_images(subject: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenprune.methods.pre_llm.divprune import DivPrune

    monkeypatch.setattr(DivPrune, "needs", frozenset({"frames"}))
    *_, record = Bench(subject, plan("divprune"), questions=draw_set("views", 1)).records()
    assert record["record"] == "skipped" and "works on videos" in record["reason"]


def control(right: str, chance: float = 0.25) -> dict[str, Any]:
    return dict(
        record="control", method="unpatched, first frame only", keep=1.0, control="first frame only",
        chance={"colour": chance}, right=[right], questions=20,
    )  # fmt: skip


@pytest.mark.parametrize(("right", "passed"), [("10" * 10, True), ("1000" * 5, False), ("0" * 20, False)])
def test_a_control_that_does_not_fail_is_said(right: str, passed: bool) -> None:
    from tests.unit.bench.test_bench import HEADER, RECORDS

    summary = results.summarise([HEADER, RECORDS[1], control(right), *RECORDS[2:]])
    assert [one.passed for one in summary.controls] == [["colour"] if passed else []]
    warned = [one for one in find_warnings(summary) if one.code == "control-passed"]
    assert len(warned) == passed
    (table,) = (one for one in tables.build_tables(summary) if one.title.startswith("Controls"))
    assert table.rows[0][1].bad is passed and "chance 25" in table.rows[0][1].text
    if passed:
        assert warned[0].items == ("first frame only: colour 100 %, chance 25 %",)


def test_controls_are_passes_of_the_unpatched_model() -> None:
    assert Pass.for_control("shuffled frames").setting is None
    assert Pass.for_control("shuffled frames").method != "unpatched"


def test_the_command_tells_evidence_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "evidence.jsonl"
    made = call(
        "bench", "--model", folder, "--set", "videos", "--images", 1, "--methods", "uniform", "--keep", "0.25",
        "--evidence", "--details", "--device", "cpu", "--json", out, "--run", tmp_path / "run",
    )  # fmt: skip
    assert "Evidence kept" in made.output and "does not generate answers" in made.output.replace("\n", " ")
    assert "Accuracy" not in made.output and "Controls" not in made.output and "Not shown" not in made.output
    again = call("report", out, "--details")
    assert "Evidence kept" in again.output and "Accuracy" not in again.output


@each(
    ("given", "why"),
    [
        (("--set", "films"), "is none of images, videos, small-videos, views"),
        (("--set", "videos", "--data", "x.jsonl"), "leave out --data"),
        (("--evidence", "--data", "x.jsonl"), "leave out --data"),
        (("--evidence", "--html", "x.html"), "asks for none"),
        (("--evidence", "--backend", "vllm"), "leave out --backend"),
        (("--set", "videos", "--images", "1", "--device", "cpu"), "this model does not support videos"),
    ],
)
def test_what_does_not_go_together_is_said(given: tuple[str, ...], why: str) -> None:
    assert why in " ".join(refused("bench", *given).split())
