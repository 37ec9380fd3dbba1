# SPDX-License-Identifier: Apache-2.0
"""Edge cases of the command line: captions, commas, Ctrl+C and truncated files."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tokenprune
from each import each
from report_runs import RIVALS, header, made, result
from tests.unit.api.test_cli import IMAGE, call, refused
from tokenprune.settings import Setting
from tokenprune_bench.cli.common import show_progress
from tokenprune_bench.point_changes import format_change
from tokenprune_bench.profiling.kept_tokens import compute_kept_share, describe_cuts, format_keep
from tokenprune_bench.profiling.model import Model, demo_model, load_model
from tokenprune_bench.profiling.pace import Pace
from tokenprune_bench.report.verdict import FEWEST, find_verdicts
from tokenprune_bench.results import summarise
from tokenprune_bench.show import draw, side_by_side
from tokenprune_bench.show.side_by_side import Panel, Shown
from tokenprune_bench.tables import build_tables
from tokenprune_bench.tuning import Promise, Trial, Tuning
from tokenprune_bench.tuning.report import build_tuning_table, describe_outcome

PROFILE = ("profile", "--config-only", "--model", "demo_vlm")  # 256 visual tokens
BENCH = ("bench", "--methods", "uniform", "--keep", "0.25", "--images", 1, "--repeats", 0, "--device", "cpu")


@pytest.fixture(scope="module")
def subject() -> Model:
    return load_model("demo_vlm", device="cpu")


# -- kept tokens -------------------------------------------------------------------------------------------------------


@each(("keep", "share"), [(64, "25 %"), (0.25, "6.25 %"), ([0.5, 16], "6.25 %"), (40, "15.6 %")])
def test_profile_prints_the_shares_that_a_stack_keeps(keep: Any, share: str, subject: Model) -> None:
    setting = Setting.from_text("divprune+fastv", keep)
    inputs = subject.inputs([Image.open(IMAGE)], ["what?"])
    with tokenprune.patched(subject.model, config=setting, guard="off"):
        subject.generate(inputs)
        num_kept = tokenprune.stats(subject.model).visual_tokens_out
    methods, budgets = setting.steps()
    text = describe_cuts(methods, budgets, 256)
    assert round(256 * compute_kept_share(budgets, 256)) == num_kept and f": {num_kept} of 256 in all ({share})" in text
    keep_argument = "+".join(map(str, keep)) if isinstance(keep, list) else keep
    output = call(*PROFILE, "--details", "--methods", "divprune+fastv", "--keep", keep_argument).stdout
    assert f"keep {share}" in output and text in output


def test_a_comma_parts_settings_and_a_plus_sign_makes_a_stack() -> None:
    several = call(*PROFILE, "--methods", "downsample,fastv:layer=3", "--keep", "0.5").stdout
    assert re.findall(r"^(\S.*?): x", several, re.MULTILINE) == ["downsample", "fastv"]
    stack = call(*PROFILE, "--details", "--methods", "downsample+fastv:layer=3", "--keep", "0.5+0.25").stdout
    assert re.findall(r"^(\S.*?): x", stack, re.MULTILINE) == ["downsample + fastv"] and "keep 12.5 %" in stack
    keeps = call(*PROFILE, "--details", "--methods", "divprune", "--keep", "0.5,0.25").stdout
    assert all(text in keeps for text in ("128 of 256", "64 of 256", "keep 50 %", "keep 25 %"))
    drafts = call("draft", "--methods", "divprune,fastv", "--keep", "0.5").stdout
    assert "divprune 0.5" in drafts and "fastv 0.5" in drafts and "+" not in drafts
    for arguments, message in (
        (("--methods", "dart+divprune", "--keep", "0.1+0.2+0.3"), "has 3 numbers for 2 methods"),
        (("--methods", "dart", "--keep", "0.1+0.2"), "has 2 numbers for 1 method in dart"),
        (("--keep", "0.1+0.2"), "needs a stack"),
        (("--methods", "dart,divprune", "--json", "x.json"), "--methods has 2"),
    ):
        assert message in refused(*PROFILE, *arguments)
    assert not Path("x.json").exists()


def test_a_profile_of_two_settings_has_a_table_of_each() -> None:
    small = ("profile", "--methods", "divprune,divprune+fastv", "--keep", "0.5", "--repeats", 1, "--max-new-tokens", 2)
    output = call(*small, "--details", "--device", "cpu").stdout
    assert output.count("Where a call's time goes") == 2 and "divprune 0.5 + fastv 0.5" in output
    assert "256 → 128 (50 %)" in output and "256 → 64 (25 %)" in output


def test_a_stack_is_captioned_with_what_it_leaves(subject: Model) -> None:
    assert format_keep(0.25, 1, 0.25) == "0.25" and format_keep(64, 2, 0.25) == "64 each, 25 % in all"
    settings = [Setting.from_text(method, 0.25) for method in ("divprune+fastv", "divprune")]
    shown = side_by_side.show(subject, [Image.open(IMAGE)], "what?", settings)
    assert [panel.title for panel in shown.kept_panels] == [
        "divprune+fastv, keep 0.25 each, 6.25 % in all", "divprune, keep 0.25",
    ]  # fmt: skip
    stack = result("divprune+fastv", 0.25, 99, 99, tokens=6.25) | {"site": "PRE_LLM+IN_LLM"}
    results = summarise([header(), result("unpatched", 1.0, 100, 100), *RIVALS, stack])
    cells = [row[1].text for row in build_tables(results)[0].rows if row[0].text == "divprune+fastv"]
    assert cells == ["0.25 each, 6.25 % in all"]
    assert find_verdicts(results)[0].answer == "divprune+fastv at keep 0.25 each, 6.25 % in all"


def test_the_tuner_tells_what_a_stack_leaves() -> None:
    cost = {
        "prefill_flops_ratio": 0.2, "keep_ratio": 0.0625, "visual_tokens_average": 60, "visual_tokens_in": 256,
        "kv_bytes": 1, "kv_bytes_full": 4,
    }  # fmt: skip
    chosen = Trial(Setting.from_text("divprune+fastv", 0.25), "chosen", 1, 1, 0.0, 0.01, cost, kinds={"all": 0})
    listed = Trial(Setting.from_text("divprune+fastv", [0.5, 0.125]), "", 1, 1, 0.0, 0.01, cost)
    tuning = Tuning(Promise(), [chosen, listed], chosen, 1, 1, {"unpatched": 1.0, "tuned": 1.0})
    assert describe_outcome(tuning)[0].startswith(
        "divprune+fastv, keep 0.25 each, 6.25 % in all: less than 1 point lost"
    )
    assert [row[1].text for row in build_tuning_table(tuning).rows] == [
        "0.25 each, 6.25 % in all", "0.5, 0.125 (6.25 % in all)",
    ]  # fmt: skip


# -- verdicts and tables of a run --------------------------------------------------------------------------------------


def test_no_number_contradicts_the_bound_beside_it() -> None:
    expected = {-0.0104: "-1.04", -0.01: "-1.0", -0.0096: "-0.96", -0.031: "-3.1", -0.03004: "-3.004", 0.0104: "+1.0"}
    assert {change: format_change(change) for change in expected} == expected
    for points in (1, 3):
        for change in np.linspace(-0.04, 0.01, 997):
            assert (-float(format_change(change)) <= points) == (-100 * change <= points + 1e-7)


def test_the_verdict_and_the_table_show_a_loss_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    import report_runs

    monkeypatch.setattr(report_runs, "QUESTIONS", 960)  # a loss of 10 of 960 questions is 1.04 points
    unpruned, pruned = result("unpatched", 1.0, 480, 480), result("near", 0.25, 475, 475)
    results = summarise([header(kind_of_question="01" * 480), unpruned, pruned])
    verdict, _ = find_verdicts(results)
    assert (
        verdict.answer == "none; near at keep 0.25 loses least"
        and "98.96, -1.04 [" in dict(verdict.facts)["accuracy %"]
    )
    (paired,) = (table for table in build_tables(results) if table.title == "Against the baselines")
    assert paired.rows[0][2].text.startswith("-1.04 [")


def test_nothing_is_best_where_nothing_can_be_said() -> None:
    def verdicts(total: int, num_right: int, **question: str) -> list[Any]:
        rows = [result("unpatched", 1.0, total, num_right), result("some", 0.25, total, num_right)]
        return find_verdicts(summarise([header(**question), *rows]))

    (verdict,) = verdicts(0, 0)
    assert verdict.row is None
    assert verdict.line.startswith("No verdict: the unpatched model scores 0 on 200 questions")
    (verdict,) = verdicts(20, 19)  # at 19.5 % accuracy, a loss of 20 points is impossible
    assert verdict.row is None and "scores 19.5 on 200 questions, too low to measure a loss" in verdict.answer
    assert len(verdicts(20, 20)) == 2
    short_rows = [
        row | {"right": [text[: FEWEST - 1] for text in row["right"]], "questions": FEWEST - 1}
        for row in (result("unpatched", 1.0, 100, 100), result("some", 0.25, 100, 100))
    ]
    (verdict,) = find_verdicts(summarise([header(kind_of_question="010"), *short_rows]))
    assert verdict.row is None
    assert verdict.line == "No verdict: a verdict needs at least 4 questions, and this run has 3"
    assert find_verdicts(made("", result("some", 0.25, 100, 100)).results)[0].row is not None


# -- interrupted runs --------------------------------------------------------------------------------------------------


def test_predictions_that_were_cut_are_named_and_nothing_changes(tmp_path: Path) -> None:
    expected = call(*BENCH, "--run", tmp_path).stdout
    path = tmp_path / "predictions.jsonl"
    content = path.read_text()
    path.write_text("".join(content.splitlines(keepends=True)[:12]))
    before = {file.name: file.read_bytes() for file in tmp_path.glob("*.jsonl")}
    error = refused(*BENCH, "--run", tmp_path)
    assert f"{path} is truncated at line 12: it has 0 of 8 answers of random at keep 0.25" in error
    assert {file.name: file.read_bytes() for file in tmp_path.glob("*.jsonl")} == before
    # Both solutions of the error message work.
    (tmp_path / "results.jsonl").unlink()
    assert call(*BENCH, "--run", tmp_path).stdout == expected
    again = path.read_text()  # the times of repeated questions differ
    assert [json.loads(line)["prediction"] for line in again.splitlines()] == [
        json.loads(line)["prediction"] for line in content.splitlines()
    ]
    content = again
    path.write_text("".join(content.splitlines(keepends=True)[:12]))
    assert "is truncated at line 12" in refused(*BENCH, "--run", tmp_path)
    path.write_text(content)
    assert call(*BENCH, "--run", tmp_path).stdout == expected


def test_a_line_of_the_predictions_without_an_answer_is_named(tmp_path: Path) -> None:
    call(*BENCH, "--run", tmp_path)
    path = tmp_path / "predictions.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({key: value for key, value in json.loads(lines[2]).items() if key != "prediction"})
    path.write_text("\n".join(lines) + "\n")
    assert f"Line 3 of {path} is damaged: it lacks prediction. Remove" in refused(*BENCH, "--run", tmp_path)


@pytest.mark.parametrize(
    ("command", "stopped", "goes_on"),
    [
        (BENCH, "tokenprune_bench.suite.Bench.header", True),
        (("tune", "--methods", "fastv", "--max-drop", "20%"), "tokenprune_bench.tuning.Tuner.run", True),
        (("demo",), "tokenprune_bench.demo.run_demo", False),
        (("methods",), "tokenprune.available_methods", False),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_ctrl_c_says_whether_the_same_command_goes_on(
    command: tuple, stopped: str, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stopped, stop)
    monkeypatch.setattr("tokenprune_bench.tuning.Tuner.estimate", lambda self: (1, None))
    if goes_on:
        result = call(*command, "--run", tmp_path / "run", code=130)
        assert result.stderr.splitlines()[-1] == "stopped; the same command goes on"
    assert call(*command, code=130).stderr.splitlines()[-1] == "stopped"


# -- remaining time ----------------------------------------------------------------------------------------------------


class Clock:
    """Clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_follows_from_the_time_taken() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.format_remaining(40, 100) == ""  # rows of an earlier run take no time
    clock.now += 20
    assert pace.format_remaining(50, 100) == "about 2 min left"
    clock.now += 20
    assert pace.format_remaining(90, 100) == "about 8 s left" and pace.format_remaining(100, 100) == ""
    clock.now += 10**5
    assert pace.format_remaining(91, 100) == "about 4.9 h left"
    assert pace.format_remaining(1, 8) == ""  # a new count starts


@pytest.mark.parametrize("lines", [True, False])
def test_the_time_left_is_told_without_a_terminal(
    lines: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Progress prints a line per label if `lines` is set, and a line every 30 seconds."""
    clock = Clock()
    monkeypatch.setattr("tokenprune_bench.profiling.pace.Pace", lambda: Pace(clock))
    with show_progress(lines=lines) as step:
        for done in range(8):
            step("one" if done < 4 else "two", done, 8)
            clock.now += 12
    printed = [line.strip() for line in capsys.readouterr().err.splitlines()]
    timed_lines = ["3/8 one, about 60 s left", "6/8 two, about 24 s left"]
    assert printed == (
        ["0/8 one", timed_lines[0], "4/8 two, about 48 s left", "7/8 two, about 12 s left"] if lines else timed_lines
    )


@pytest.mark.parametrize("command", ["bench", "tune", "profile"])
def test_commands_show_their_progress(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def progress(lines: bool = True) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(import_module(f"tokenprune_bench.cli.{command}"), "show_progress", progress)
    with pytest.raises(ZeroDivisionError):
        call(command, "--device", "cpu", *(("--max-drop", "20%", "--methods", "fastv") if command == "tune" else ()))


# -- invalid questions -------------------------------------------------------------------------------------------------


def test_all_rows_that_do_not_fit_the_model_are_named_at_once(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "ok.png")
    for name, size in {"wide": (2000, 2), "narrow": (2, 2000)}.items():
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    Image.new("RGB", (8, 8)).save(tmp_path / "v.gif")
    rows = [
        {"image": "ok.png"}, {"image": "wide.png"}, {"video": "v.gif"}, {"image": "narrow.png"}, {"video": "v.gif"},
        {"image": "ok.png", "question": "is <|image_pad|> it?"}, {"image": "ok.png", "question": "is <image> it?"},
    ]  # fmt: skip
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"question": "what?", "answer": "a", **row}) + "\n" for row in rows))
    command = (*BENCH[:5], "--repeats", 0, "--device", "cpu", "--data", data)
    error = refused(*command, "--model", "demo_vlm")
    assert "3 of 7 questions" in error and "line 3, line 5: is about a video" in error
    assert "line 7: its question contains the placeholder '<image>'" in error and "--skip-bad" in error
    error = refused(*command, "--model", "demo_qwen")
    assert "3 of 7 questions" in error and "line 6: its question contains the placeholder '<|image_pad|>'" in error
    assert "line 2: has an image of 2000 x 2: absolute aspect ratio" in error and "line 4: has an image of 2 x" in error
    result = call(*command, "--model", "demo_qwen", "--skip-bad")
    assert [line[:16] for line in result.stderr.splitlines() if line.startswith("skipped")] == [
        f"skipped: line {line_number}:" for line_number in (2, 4, 6)
    ]


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_says_what_the_processor_crops_away(subject: Model, tmp_path: Path) -> None:
    wide = tmp_path / "wide.png"
    Image.new("RGB", (1000, 500), "gray").save(wide)
    output = call("show", wide, "--device", "cpu", "--out", tmp_path / "out.png").stdout
    (line,) = (line for line in output.splitlines() if line.startswith(draw.CROPS))
    shares = [int(text) for text in re.findall(r"(\d+)% at the (?:left|right)", line)]
    width, height = map(int, re.search(r"sees (\d+) x (\d+) of 1000 x 500", line).groups())
    assert shares == [25, 25] and abs(width - 500) <= 12 and height == 500
    shown = side_by_side.show(subject, [Image.open(wide)], "what?", [Setting.from_text("uniform", 0.25)])
    assert line in shown.caption
    for size, sides in {(500, 1000): "25% at the top and 25% at the bottom", (600, 600): ""}.items():
        image = Image.new("RGB", size)
        assert sides in draw.describe_crop(image, draw.seen_box(subject, image))
        assert bool(sides) == bool(draw.describe_crop(image, draw.seen_box(subject, image)))
    assert draw.describe_crop(image, None) == ""


def test_outlines_are_seen_on_white_and_on_black() -> None:
    image = Image.new("RGB", (128, 64), "white")
    image.paste("black", (64, 0, 128, 64))
    kept = np.ones((2, 4), bool)
    pixels = np.asarray(draw.draw(image, kept, np.arange(8).reshape(2, 4)), int)
    cells = pixels.reshape(2, 32, 4, 32, 3).transpose(0, 2, 1, 3, 4).reshape(8, 32, 32, 3)
    for cell in cells:
        assert np.abs(cell[0] - cell[16, 16]).sum(-1).min() > 200
        assert np.abs(cell[:, -1] - cell[16, 16]).sum(-1).min() > 200


def test_a_map_of_scores_stands_under_its_own_method() -> None:
    def panel(title: str, scores: bool = False) -> Panel:
        return Panel(Image.new("RGB", (40, 40)), title, (), scores)

    a, b, c, d = (panel(name) for name in "abcd")
    scores_b, scores_d = panel("b", True), panel("d", True)
    views = [type("One", (), {"frames": [1]})] * 3
    shown = Shown((), [a, b, scores_b, c, d, scores_d], views, "", 1)
    assert shown.lines(3) == [[a, b, c], [None, scores_b, None], [d], [scores_d]]
    assert shown.lines(1) == [[a], [b], [scores_b], [c], [d], [scores_d]]
    assert Shown((), [a, c], views[:1], "", 1).lines(2) == [[a, c]]
    assert shown.image().height > shown.image().width / 3


def test_no_question_about_a_circle_and_the_shipped_model_knows_drawings_only(tmp_path: Path, subject: Model) -> None:
    photo, out = tmp_path / "photo.png", ("--device", "cpu", "--out", tmp_path / "out.png")
    Image.new("RGB", (64, 64), "gray").save(photo)
    output = call("show", photo, *out).stdout
    assert "what is shown?" in output and "unpatched" in output and "circle" not in output
    assert "demo_vlm (shipped) was trained only on synthetic scenes" in output
    assert "only on synthetic scenes" not in call("show", IMAGE, *out).stdout  # a synthetic scene
    assert subject.describe_limits() and subject.describe_limits([photo]) and not subject.describe_limits([IMAGE])
    other = Model(subject.model, subject.processor, "other")
    assert other.describe_limits([photo]) == ""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"image": "photo.png", "question": "what?", "answer": "a"}))
    command = (*BENCH[:5], "--repeats", 0, "--device", "cpu")
    assert "trained only on synthetic scenes" in call(*command, "--data", rows).stderr
    assert "trained only on synthetic scenes" not in call(*command, "--images", 1).stderr


# -- the app -----------------------------------------------------------------------------------------------------------


def test_lines_of_python_to_copy_run_one_after_the_other() -> None:
    from tokenprune.statistics import Stats
    from tokenprune_bench.app import snippets
    from tokenprune_bench.app.comparison import SettingResult

    model, processor = demo_model(device="cpu")
    settings = [Setting.from_text(name, 0.5) for name in ("divprune", "fastv", "downsample+dart")]
    code = snippets.python(*settings)
    names: dict[str, Any] = {"tokenprune": tokenprune, "model": model, "processor": processor}
    exec(code, names)
    assert [method.name for method in tokenprune.api.get_attachment(model).methods] == ["downsample", "dart"]
    assert code.count("tokenprune.patch(") == 3 and snippets.python(settings[0]).count("\n") == 0
    result = SettingResult(Setting.from_text("divprune+fastv", 0.25), 256, 16, b"", Stats())
    assert result.keep_text == "0.25 each, 6.25 % in all"
