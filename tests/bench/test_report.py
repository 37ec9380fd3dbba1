# SPDX-License-Identifier: Apache-2.0
"""The report: what it warns of, how runs are read and compared, the geometry of its plots, and names that mean harm.

test_report_browser.py opens it, test_report_samples.py draws for it.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.test_cli import call, refused
from tokenprune import TokenPruneError
from tokenprune.bench import results
from tokenprune.bench.report import compare, plots, warnings
from tokenprune.bench.report.layers import layer_plots
from tokenprune.bench.report.page import make_page
from tokenprune.bench.report.runs import Run, read_runs
from tokenprune.bench.report.styles import Styles

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}`"
QUESTIONS = 200  # half of each kind


def header(**changes: Any) -> dict[str, Any]:
    environment = dict(
        model="tiny", device="cpu", machine="x86_64", threads=1, dtype="float32", cores=2, tokenprune="0", torch="2"
    )
    environment |= changes.pop("environment", {})
    return dict(
        record="header", schema=results.SCHEMA, date="2026-01-01T00:00:00+00:00", kinds=["colour", "word"],
        kind_of_question="01" * (QUESTIONS // 2), plan=dict(seeds=[0]), environment=environment,
    ) | changes  # fmt: skip


def result(method: str, keep: float, colours: int, words: int, tokens: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A result with so many of 100 right of each kind, and `tokens` of 100 in each of two layers; default: its keep."""
    tokens = tokens or 100 * keep
    right = "".join(f"{number < colours:d}{number < words:d}" for number in range(QUESTIONS // 2))
    per_layer = [tokens * QUESTIONS] * 2
    stats = dict(
        visual_tokens_in=100 * QUESTIONS, visual_tokens_out=tokens * QUESTIONS, visual_tokens_per_layer=per_layer,
        visual_tokens_average=tokens * QUESTIONS, keep_ratio=keep, prefill_flops_ratio=keep, kv_bytes=2048,
        kv_bytes_full=8192, overhead_ms=1.0,
    )  # fmt: skip
    return dict(
        record="result", method=method, keep=keep, site=None if method == "unpatched" else "PRE_LLM", seeds=None,
        right=[right], questions=QUESTIONS, stats=stats,
    ) | changes  # fmt: skip


def timing(ratio: float, load: float = 0.5) -> dict[str, Any]:
    times = {
        f"{name}_{unit}": dict(p20=1.0, p50=ratio, p80=3.0) for name in ("ttft", "token") for unit in ("ms", "ratio")
    }
    times["ttft_ms"]["p50"] = 40 * ratio
    return dict(repeats=1, rows=1, load=load, **times)


BASE = result("unpatched", 1.0, 100, 100)
RIVALS = [result("random", 0.25, 60, 60), result("downsample", 0.25, 50, 50)]
GOOD = result("good", 0.25, 99, 98)


def codes(*records: dict[str, Any], **changes: Any) -> list[str]:
    made = results.summarise([header(**changes), BASE, *records])
    return [one.code for one in warnings.find_warnings(made)]


def one_warning(code: str, *records: dict[str, Any], **changes: Any) -> warnings.RunWarning:
    made = results.summarise([header(**changes), BASE, *records])
    return next(one for one in warnings.find_warnings(made) if one.code == code)


def write_run(path: Path, *records: dict[str, Any], **changes: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in (header(**changes), BASE, *(records or (*RIVALS, GOOD)))))
    return path


# -- warnings --------------------------------------------------------------------------------------------------------


def test_a_clean_run_has_no_warnings_and_baselines_are_not_warned_of() -> None:
    assert codes(*RIVALS, GOOD) == []  # random and downsample lose both kinds, and may


def test_worse_and_not_better_are_told_apart() -> None:
    worse, equal = result("worse", 0.25, 40, 60), result("equal", 0.25, 60, 60)
    found = one_warning("worse-than-random", *RIVALS, worse, equal)
    assert len(found.items) == 1 and found.items[0].startswith("worse at 0.25: -10.0 points [-")
    assert found.level is warnings.Level.BAD and "picked at random get more" in found.text
    assert one_warning("not-better-than-random", *RIVALS, worse, equal).items == ("equal at 0.25",)
    # 50 % against downsample's 50 %: not better, and not worse either
    assert one_warning("not-better-than-downsample", *RIVALS, worse).items == ("worse at 0.25",)
    assert "worse-than-downsample" in codes(*RIVALS, result("worst", 0.25, 40, 40))
    assert "200 questions do not show" in one_warning("not-better-than-random", *RIVALS, equal).text


def test_without_a_baseline_that_is_said() -> None:
    assert codes(RIVALS[0], GOOD) == ["no-downsample"]
    assert codes(GOOD) == ["no-random", "no-downsample"]


def test_lost_kinds_are_named_and_text_apart() -> None:
    lost = result("lost", 0.25, 79, 70), result("lost", 0.5, 80, 79)
    found = one_warning("ocr-collapse", *RIVALS, *lost)
    assert found.items == ("lost at 0.25: word 100 → 70 %", "lost at 0.5: word 100 → 79 %")
    assert one_warning("collapse", *RIVALS, *lost).items == ("lost at 0.25: colour 100 → 79 %",)  # 80 is no collapse
    for kind, reading in (
        ("OCR", 1),
        ("digits", 1),
        ("scene_text", 1),
        ("doc-vqa", 1),
        ("context", 0),
        ("keywords", 0),
    ):
        found = codes(*RIVALS, lost[1], kinds=["colour", kind])
        assert ("ocr-collapse" in found, "collapse" in found) == (bool(reading), not reading), kind


def test_slow_and_busy_runs_are_named() -> None:
    def timed(ratio: float, load: float = 0.5) -> dict[str, Any]:
        return GOOD | dict(timing=timing(ratio, load))

    assert codes(*RIVALS, timed(0.99)) == []
    found = one_warning("not-faster", *RIVALS, timed(1.0))
    assert found.items == ("good at 0.25: 1.00 × the time of the unpatched",)
    assert codes(*RIVALS, timed(0.5, load=2.4)) == []
    assert "2.6 on 2 cores" in one_warning("busy", *RIVALS, timed(0.5, load=2.6)).text
    # Of times that are not to be relied on nothing is concluded.
    assert codes(*RIVALS, timed(1.2, load=2.6)) == ["busy"]
    assert codes(*RIVALS, GOOD | dict(timing=dict(repeats=1, rows=1, load=None, other=1))) == []


def test_few_questions_are_named() -> None:
    def short(record: dict[str, Any]) -> dict[str, Any]:
        return record | dict(right=[record["right"][0][:20]], questions=20)

    records = [header(kind_of_question="01" * 8 + "0" * 4), short(BASE), *map(short, RIVALS), short(GOOD)]
    (found,) = (one for one in warnings.find_warnings(results.summarise(records)) if one.code == "few-questions")
    assert found.title == "Only 20 questions" and "as few as 8 questions" in found.text


def test_what_is_missing_is_named() -> None:
    skipped = [dict(record="skipped", method="odd", keep=keep, reason="it cannot") for keep in (0.5, 0.25)]
    assert one_warning("skipped-methods", *RIVALS, GOOD, *skipped).items == ("odd at 0.5, 0.25: it cannot",)
    data = dict(name="mine", questions=QUESTIONS, digest="d", skipped=["line 3: no question", "line 9: bad"])
    found = one_warning("skipped-rows", *RIVALS, GOOD, data=data)
    assert found.title == "2 rows left out" and found.items == ("line 3: no question", "line 9: bad")
    plan = dict(seeds=[0], methods=["random", "downsample", "good"], keeps=[0.25])
    assert codes(*RIVALS, GOOD, plan=plan) == []
    assert "3 of 4 results" in one_warning("unfinished", *RIVALS, plan=plan).text


def test_the_worst_comes_first_and_lines_are_short() -> None:
    many = [result(f"m{number}", 0.25, 30, 30) | dict(timing=timing(1.2, 9)) for number in range(6)]
    records = [header(), BASE, *RIVALS, *many, dict(record="skipped", method="odd", keep=1, reason="no")]
    made = results.summarise(records)
    found = warnings.find_warnings(made)
    assert [one.level for one in found] == sorted(one.level for one in found)
    assert {"worse-than-random", "ocr-collapse", "busy", "skipped-methods"} <= {one.code for one in found}
    lines = warnings.lines(made)
    assert lines[0].startswith("Worse than `random`: m0 at 0.25: -30.0 points") and lines[0].endswith("; and 2 more")
    assert not [line for line in lines if "busy" in line or "left out" in line]  # the tables say these


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_cannot_be_named_twice(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a.jsonl")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/results.jsonl").write_text(first.read_text())
    for same in (first, tmp_path / "run"):
        with pytest.raises(TokenPruneError, match=r"hold the same run: name each run once"):
            read_runs([first, write_run(tmp_path / "b.jsonl", date="later"), same])
    runs = read_runs([first, write_run(tmp_path / "b.jsonl", date="later")])
    assert [(run.label, run.title) for run in runs] == [("A", "A: a.jsonl"), ("B", "B: b.jsonl")]
    assert read_runs([first])[0].title == "tiny"


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot read"),
        ("", "its first line is no header"),
        ("{", "holds no JSON lines"),
        (json.dumps(header()), "no result of the unpatched model"),
        (json.dumps(header(kinds=7)) + "\n" + json.dumps(BASE), "is damaged"),
        (json.dumps(header(environment=dict(cores="x"))) + "\n" + json.dumps({**BASE, "stats": 3}), "is damaged"),
        (json.dumps(header(metric="none")) + "\n" + json.dumps(BASE), "is damaged"),
        (json.dumps(header()) + "\n" + json.dumps(BASE | dict(extra=float("nan"))), "is damaged"),
    ],
)
def test_what_cannot_be_read_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    good, bad = write_run(tmp_path / "good.jsonl"), tmp_path / "bad.jsonl"
    if text is not None:
        bad.write_text(text)
    with pytest.raises(TokenPruneError, match=message) as error:
        read_runs([good, bad])
    assert str(bad) in str(error.value)


def made(label: str = "", *records: dict[str, Any], **changes: Any) -> Run:
    records = records or (*RIVALS, GOOD)
    return Run(f"run{label}", results.summarise([header(**changes), BASE, *records]), label=label)


def test_runs_are_compared_where_they_asked_the_same() -> None:
    data = dict(name="x", questions=QUESTIONS, skipped=[])
    runs = [
        made("A"), made("B", environment=dict(model="other")), made("C", data=data | dict(digest="1")),
        made("D", data=data | dict(digest="1", name="y")), made("E", metric="relaxed"),
        made("F", kinds=["colour", "x"]),
    ]  # fmt: skip
    assert [[run.label for run in group] for group in compare.same_questions(runs)] == [
        ["A", "B"], ["C", "D"], ["E"], ["F"],
    ]  # fmt: skip
    assert compare.same_machine(runs) and not compare.same_machine([runs[0], made(environment=dict(threads=2))])


def test_the_table_of_two_runs_by_hand() -> None:
    first = made("A", *RIVALS, GOOD, result("good", 0.5, 100, 98))
    other = made(
        "B", *RIVALS, result("new", 0.25, 90, 80), result("good", 0.25, 96, 98), environment=dict(model="other")
    )
    (table,) = compare.comparisons([first, other])
    assert table.title == "A and B on the same questions"
    assert table.columns[2:] == (
        "A: accuracy %",
        "vs unpatched",
        "layer avg",
        "B: accuracy %",
        "vs unpatched",
        "layer avg",
    )
    rows = {tuple(cell.text for cell in row[:2]): [cell.text for cell in row[2:]] for row in table.rows}
    assert rows["unpatched", ""] == ["100.0", "", "100", "100.0", "", "100"]
    assert rows["good", "0.25"] == ["98.5", "-1.5", "25", "97.0", "-3.0", "25"]
    assert rows["good", "0.5"] == ["99.0", "-1.0", "50", "", "", ""]
    assert rows["new", "0.25"] == ["", "", "", "85.0", "-15.0", "25"]
    assert [row[0].text for row in table.rows] == ["unpatched", "random", "downsample", "good", "good", "new"]
    assert compare.comparisons([first]) == []


def test_the_command_takes_several_runs(tmp_path: Path) -> None:
    first, other = write_run(tmp_path / "a.jsonl"), write_run(tmp_path / "b.jsonl", result("bad", 0.25, 5, 5))
    page = tmp_path / "page.html"
    printed = call("report", first, other, "--html", page).stdout
    assert printed.count("Accuracy by kind of question") == 2
    assert "A and B on the same questions" in printed and "! Reading is lost: bad at 0.25: word 100 → 5 %" in printed
    assert page.read_text().startswith("<!doctype html>")
    text = call("report", first, other, "--markdown").stdout
    assert "## B: b.jsonl (tiny)" in text and "| good | 0.25 | 98.5 | -1.5 | 25 |" in text
    assert "- Reading is lost" in text and "**A and B on the same questions**" in text
    assert "## " not in call("report", first, "--markdown").stdout
    assert "--plot draws one run" in refused("report", first, other, "--plot", tmp_path / "p.png")
    assert "hold the same run" in refused("report", first, first)


# -- plots -----------------------------------------------------------------------------------------------------------


def point(x: float, y: float, name: str = "") -> plots.Point:
    return plots.Point(x, y, y, y, name, name)


def test_the_front_is_that_of_a_loop_over_pairs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [point(*rng.integers(0, 6, 2)) for _ in range(rng.integers(1, 15))]

        def beaten(one: plots.Point, other: plots.Point) -> bool:
            return other.x <= one.x and other.y >= one.y and (other.x, other.y) != (one.x, one.y)

        want = {(p.x, p.y) for p in points if not any(beaten(p, other) for other in points)}
        front = plots.front_of(points)
        assert {(points[i].x, points[i].y) for i in front} == want
        assert len(front) == len(want) and front == sorted(front, key=lambda i: points[i].x)
    assert plots.front_of([point(1, 1), point(1, 1)]) == [0]


def test_ticks_are_round_and_hold_everything() -> None:
    assert plots.ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert plots.ticks(83, 97.5) == [82.5, 85, 87.5, 90, 92.5, 95, 97.5]
    assert plots.ticks(5, 5) == pytest.approx(np.arange(5, 6.01, 0.2))
    for low, high in np.random.default_rng(1).uniform(0, 1000, (100, 2)):
        low, high = sorted((low, high))
        found = plots.ticks(low, high)
        assert found[0] <= low + 1e-6 and found[-1] >= high - 1e-6 and 3 <= len(found) <= 9
        assert np.ptp(np.diff(found)) < 1e-6


def test_a_plot_by_hand() -> None:
    look = plots.method_style(0, "m0")
    series = [plots.Series(look, (point(100, 100, "all"), point(50, 60, "half"))), plots.Series(look, (point(60, 60),))]
    plot = plots.pareto("t", "x", "y", series, guide=100.0)
    first, lone = plot.series
    assert [(mark.x, mark.y, mark.front) for mark in first.marks] == [(288.8, 348.0, True), (529.6, 48.0, True)]
    assert first.line == "288.8,348.0 529.6,48.0"
    assert lone.line == "" and not lone.marks[0].front
    assert plot.front == "M288.8 348V348.0H529.6V48.0H544"  # up to a point, then on at its height to the next
    assert plot.guide == 529.6
    assert [text for text, _ in plot.told] == ["half", "all"]
    assert [(tick.place, tick.text) for tick in plot.x_ticks][:2] == [(48.0, "0"), (144.3, "20")]
    assert plots.pareto("t", "x", "y", []) is None
    assert plots.pareto("t", "x", "y", [plots.Series(look, (point(0, 0),))]) is not None  # nothing right, no tokens


def test_labels_cover_neither_marks_nor_each_other() -> None:
    rng = np.random.default_rng(2)
    look = plots.method_style(0, "")
    points = tuple(
        point(float(x), float(100 - (100 - x) ** 2 / 100), f"method 0.{x}") for x in rng.integers(1, 100, 30)
    )
    plot = plots.pareto("t", "x", "y", [plots.Series(look, points)])
    boxes = []
    for label in plot.labels:
        width = plots._LETTER * len(label.text)
        left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
        boxes.append((left, label.y - 0.8 * plots._TEXT, left + width, label.y + 0.25 * plots._TEXT))
        assert plot.left <= left + 0.1 and left + width <= plot.right + 0.1
    assert 3 < len(boxes) < len(plot.told)
    assert not any(plots._overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    for mark in plot.series[0].marks:
        assert not any(left < mark.x < right and top < mark.y < bottom for left, top, right, bottom in boxes)


def test_looks_are_the_same_everywhere_and_differ() -> None:
    runs = [made("A"), made("B", *RIVALS, result("new", 0.25, 9, 9), GOOD)]
    styles = Styles.of(runs)
    assert [name for name, _ in styles.legend(runs[0])] == ["unpatched", "random", "downsample", "good"]
    assert [name for name, _ in styles.legend(runs[1])] == ["unpatched", "random", "downsample", "good", "new"]
    assert styles.of_run("new", "B").path == styles.methods["new"].path
    assert styles.of_run("new", "B").tags.split() == ["m1", "r1"] and styles.of_run("random", "A").dashed
    many = [plots.method_style(number, "") for number in range(64)]
    assert len({(look.css, look.path) for look in many}) == 64


def test_layers_are_told_once_for_methods_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    late = result("late", 0.25, 9, 9)
    late["stats"]["visual_tokens_per_layer"] = [100 * QUESTIONS] * 3 + [25.4 * QUESTIONS]
    same = result("same", 0.25, 9, 9)
    run = made("", *RIVALS, same, late, result("half", 0.5, 9, 9), result("sixteen", 16, 9, 9, tokens=16))
    styles = Styles.of([run])
    quarter, half, fixed = layer_plots(run.results, styles.methods.__getitem__)
    assert [(names, text) for names, text, _ in quarter.told] == [
        ("random, downsample, same", "25 in every layer"),
        ("late", "100 in layers 1–3, 25 in layer 4"),
    ]
    assert quarter.told[0][2].tags == "m-base0 m-base1 m0"  # any of the three lights it up
    assert (half.plot.title, fixed.plot.title) == ("keep 0.5", "keep 16 tokens")
    assert [len(plot.plot.series) for plot in (quarter, half, fixed)] == [3, 2, 2]  # the unpatched model is in each
    monkeypatch.setitem(run.results.baseline.stats, "visual_tokens_per_layer", [])
    assert layer_plots(run.results, styles.methods.__getitem__) == []


# -- the page --------------------------------------------------------------------------------------------------------


class Seen(HTMLParser):
    """The tags of a page with their attributes, its text, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last = self.tags[-1][0] if self.tags else ""
        if last in self.inside and data.strip():
            self.inside[last].append(data)
        else:
            self.text += data


def evil_run(label: str = "") -> Run:
    data = dict(name=EVIL, questions=QUESTIONS, digest="d", skipped=[EVIL])
    records = [*RIVALS, result(EVIL, 0.25, 5, 5), dict(record="skipped", method=EVIL, keep=0.5, reason=EVIL)]
    run = made(label, *records, data=data, kinds=["colour", EVIL], environment=dict(model=EVIL), suffix=EVIL)
    return Run(EVIL, run.results, label=label)


def test_names_are_text_and_nothing_else() -> None:
    page = make_page([evil_run("A"), evil_run("B")])
    seen = Seen(page)
    names = [tag for tag, _ in seen.tags]
    assert (names.count("script"), names.count("style"), names.count("img")) == (1, 1, 0)
    assert not [name for _, attrs in seen.tags for name in attrs if name.startswith("on") or name == "style"]
    assert "alert(1)" in seen.text and "49" not in seen.text  # there, as text, and no template was run
    assert "alert(1)" not in "".join(seen.inside["script"])


def test_the_page_loads_nothing_and_runs_what_is_ours() -> None:
    page = make_page([made("A", *RIVALS, GOOD | dict(timing=timing(0.5))), made("B", environment=dict(model="other"))])
    seen = Seen(page)
    assert "http" not in page.replace("http-equiv", "") and "url(" not in page and "@import" not in page
    assert not [attrs for _, attrs in seen.tags if {"src", "action", "ping"} & attrs.keys()]
    links = [attrs["href"] for _, attrs in seen.tags if "href" in attrs]
    assert all(link.startswith("#") or link == "data:," for link in links)
    ids = [attrs["id"] for _, attrs in seen.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link.startswith("#")} <= set(ids)
    (policy,) = (attrs["content"] for tag, attrs in seen.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:;") and "unsafe" not in policy
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256("".join(seen.inside[name]).encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_the_same_runs_give_the_same_page() -> None:
    runs = [made("A"), evil_run("B")]
    assert make_page(runs) == make_page(runs)
    assert "\ud800" not in make_page([made(environment=dict(model="half \ud800"))])


def test_what_the_page_cannot_show_is_said() -> None:
    page = make_page([made()])
    assert "this run took no times (--repeats 0)" in page and "bench --run DIR" in page
    assert "<h3>No warnings</h3>" in page and page.count('<figure class="plot') == 2  # one of them of layers
    timed = GOOD | dict(timing=timing(0.5))
    page = make_page([made("", *RIVALS, timed)])
    assert "Not timed, and so not in the second plot: random 0.25, downsample 0.25." in page
    assert "time to first token, % of the unpatched 40 ms" in page
    page = make_page([made("A", *RIVALS, timed), made("B"), made("C", kinds=["colour", "x"])])
    assert "No plot against time: B took no times." in page and "Not compared" in page
    page = make_page([made("A", *RIVALS, timed), made("B", *RIVALS, timed, environment=dict(threads=2))])
    assert "timed on different machines" in page and "Not compared" not in page


def test_graded_metrics_keep_their_names() -> None:
    scores = {"scores": [[0.5] * QUESTIONS]}
    records = [one | scores for one in (BASE, *RIVALS, GOOD)]
    page = make_page([Run("x", results.summarise([header(metric="anls"), *records]))])
    assert ">ANLS %</text>" in page


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(TokenPruneError, match=r"needs Jinja2: pip install 'tokenprune-vlm\[bench\]'"):
        make_page([made()])


def test_the_templates_are_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel")
    root = Path(__file__).parents[2]
    files = {file.relative_path for file in wheel.WheelBuilder(str(root)).recurse_included_files()}
    folder = root / "tokenprune/bench/report/templates"
    assert {path.relative_to(root).as_posix() for path in folder.iterdir()} <= files
