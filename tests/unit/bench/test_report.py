# SPDX-License-Identifier: Apache-2.0
"""Test the plots and the page of the report."""

from __future__ import annotations

import base64
import hashlib
import itertools
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from report_runs import BASE, GOOD, QUESTIONS, RIVALS, header, made, result, timing
from tokenprune import TokenPruneError
from tokenprune_bench import results
from tokenprune_bench.report import plots
from tokenprune_bench.report.layers import build_layer_plots
from tokenprune_bench.report.page import make_page
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}`"


# -- plots -------------------------------------------------------------------------------------------------------------


def build_point(x: float, y: float, name: str = "") -> plots.Point:
    return plots.Point(x, y, y, y, name, name)


def test_the_front_equals_a_loop_over_pairs() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = [build_point(*rng.integers(0, 6, 2)) for _ in range(rng.integers(1, 15))]

        def beaten(candidate: plots.Point, other: plots.Point) -> bool:
            return (
                other.x <= candidate.x and other.y >= candidate.y and (other.x, other.y) != (candidate.x, candidate.y)
            )

        expected = {(p.x, p.y) for p in points if not any(beaten(p, other) for other in points)}
        front = plots.find_front(points)
        assert {(points[i].x, points[i].y) for i in front} == expected
        assert len(front) == len(expected) and front == sorted(front, key=lambda i: points[i].x)
    assert plots.find_front([build_point(1, 1), build_point(1, 1)]) == [0]


def test_ticks_are_round_and_hold_everything() -> None:
    assert plots.compute_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert plots.compute_ticks(83, 97.5) == [82.5, 85, 87.5, 90, 92.5, 95, 97.5]
    assert plots.compute_ticks(5, 5) == pytest.approx(np.arange(5, 6.01, 0.2))
    for low, high in np.random.default_rng(1).uniform(0, 1000, (100, 2)):
        low, high = sorted((low, high))
        ticks = plots.compute_ticks(low, high)
        assert ticks[0] <= low + 1e-6 and ticks[-1] >= high - 1e-6 and 3 <= len(ticks) <= 9
        assert np.ptp(np.diff(ticks)) < 1e-6


def test_a_plot_by_hand() -> None:
    look = plots.get_method_style(0, "m0")
    series = [
        plots.Series(look, (build_point(100, 100, "all"), build_point(50, 60, "half"))),
        plots.Series(look, (build_point(60, 60),)),
    ]
    plot = plots.build_pareto_plot("t", "x", "y", series, guide=100.0)
    first, lone = plot.series
    assert [(mark.x, mark.y, mark.front) for mark in first.marks] == [(288.8, 348.0, True), (529.6, 48.0, True)]
    assert first.line == "288.8,348.0 529.6,48.0"
    assert lone.line == "" and not lone.marks[0].front
    assert plot.front == "M288.8 348V348.0H529.6V48.0H544"  # up to a point, then at its height to the next point
    assert plot.guide == 529.6
    assert [text for text, _ in plot.front_in_words] == ["half", "all"]
    assert [(tick.offset, tick.text) for tick in plot.x_ticks][:2] == [(48.0, "0"), (144.3, "20")]
    assert plots.build_pareto_plot("t", "x", "y", []) is None
    no_tokens = plots.Series(look, (build_point(0, 0),))  # right answers without tokens
    assert plots.build_pareto_plot("t", "x", "y", [no_tokens]) is not None


def test_labels_cover_neither_marks_nor_each_other() -> None:
    rng = np.random.default_rng(2)
    look = plots.get_method_style(0, "")
    points = tuple(
        build_point(float(x), float(100 - (100 - x) ** 2 / 100), f"method 0.{x}") for x in rng.integers(1, 100, 30)
    )
    plot = plots.build_pareto_plot("t", "x", "y", [plots.Series(look, points)])
    boxes = []
    for label in plot.labels:
        width = plots._LETTER * len(label.text)
        left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
        boxes.append((left, label.y - 0.8 * plots._TEXT, left + width, label.y + 0.25 * plots._TEXT))
        assert plot.left <= left + 0.1 and left + width <= plot.right + 0.1
    assert 3 < len(boxes) < len(plot.front_in_words)
    assert not any(plots._overlap(a, b) for a, b in itertools.combinations(boxes, 2))
    for mark in plot.series[0].marks:
        assert not any(left < mark.x < right and top < mark.y < bottom for left, top, right, bottom in boxes)


def test_looks_are_the_same_everywhere_and_differ() -> None:
    runs = [made("A"), made("B", *RIVALS, result("new", 0.25, 9, 9), GOOD)]
    styles = Styles.from_runs(runs)
    assert [name for name, _ in styles.legend(runs[0])] == ["unpatched", "random", "downsample", "good"]
    assert [name for name, _ in styles.legend(runs[1])] == ["unpatched", "random", "downsample", "good", "new"]
    assert styles.get_run_style("new", "B").path == styles.methods["new"].path
    assert styles.get_run_style("new", "B").tags.split() == ["m1", "r1"] and styles.get_run_style("random", "A").dashed
    many = [plots.get_method_style(index, "") for index in range(64)]
    assert len({(look.css, look.path) for look in many}) == 64


def test_layers_are_told_once_for_methods_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    late = result("late", 0.25, 9, 9)
    late["stats"]["visual_tokens_per_layer"] = [100 * QUESTIONS] * 3 + [25.4 * QUESTIONS]
    same = result("same", 0.25, 9, 9)
    run = made("", *RIVALS, same, late, result("half", 0.5, 9, 9), result("sixteen", 16, 9, 9, tokens=16))
    styles = Styles.from_runs([run])
    quarter, half, fixed = build_layer_plots(run.results, styles.methods.__getitem__)
    assert [(names, text) for names, text, _ in quarter.curves_in_words] == [
        ("random, downsample, same", "25 in every layer"),
        ("late", "100 in layers 1–3, 25 in layer 4"),
    ]
    assert quarter.curves_in_words[0][2].tags == "m-base0 m-base1 m0"  # each of the three methods highlights it
    assert (half.plot.title, fixed.plot.title) == ("keep 0.5", "keep 16 tokens")
    # Each plot has the unpatched model.
    assert [len(plot.plot.series) for plot in (quarter, half, fixed)] == [3, 2, 2]
    monkeypatch.setitem(run.results.baseline.stats, "visual_tokens_per_layer", [])
    assert build_layer_plots(run.results, styles.methods.__getitem__) == []


# -- the page ----------------------------------------------------------------------------------------------------------


class ParsedPage(HTMLParser):
    """The tags and attributes of a page, its text, and the text of its scripts and styles."""

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


def test_harmful_names_are_escaped() -> None:
    page = make_page([evil_run("A"), evil_run("B")])
    parsed = ParsedPage(page)
    names = [tag for tag, _ in parsed.tags]
    assert (names.count("script"), names.count("style"), names.count("img")) == (1, 1, 0)
    assert not [name for _, attrs in parsed.tags for name in attrs if name.startswith("on") or name == "style"]
    # The harmful names are text, and templates did not evaluate them.
    assert "alert(1)" in parsed.text and "49" not in parsed.text
    assert "alert(1)" not in "".join(parsed.inside["script"])


def test_the_page_makes_no_requests_and_runs_only_its_script() -> None:
    page = make_page([made("A", *RIVALS, GOOD | dict(timing=timing(0.5))), made("B", environment=dict(model="other"))])
    parsed = ParsedPage(page)
    assert "http" not in page.replace("http-equiv", "") and "url(" not in page and "@import" not in page
    assert not [attrs for _, attrs in parsed.tags if {"src", "action", "ping"} & attrs.keys()]
    links = [attrs["href"] for _, attrs in parsed.tags if "href" in attrs]
    assert all(link.startswith("#") or link == "data:," for link in links)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link.startswith("#")} <= set(ids)
    (policy,) = (attrs["content"] for tag, attrs in parsed.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:;") and "unsafe" not in policy
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256("".join(parsed.inside[name]).encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_the_same_runs_give_the_same_page() -> None:
    runs = [made("A"), evil_run("B")]
    assert make_page(runs) == make_page(runs)
    assert "\ud800" not in make_page([made(environment=dict(model="half \ud800"))])


def test_the_page_names_missing_parts() -> None:
    page = make_page([made()])
    assert "this run has no timing (--repeats 0)" in page and "bench --run DIR" in page
    assert "<h3>No warnings</h3>" in page and page.count('<figure class="plot') == 2  # including the plot of layers
    timed = GOOD | dict(timing=timing(0.5))
    page = make_page([made("", *RIVALS, timed)])
    assert "Without timing, and not in the second plot: random 0.25, downsample 0.25." in page
    assert "time to first token, % of the unpatched 40 ms" in page
    page = make_page([made("A", *RIVALS, timed), made("B"), made("C", kinds=["colour", "x"])])
    assert "No plot against time: B have no timing." in page and "Not compared" in page
    page = make_page([made("A", *RIVALS, timed), made("B", *RIVALS, timed, environment=dict(threads=2))])
    assert "timed on different machines" in page and "Not compared" not in page


def test_graded_metrics_keep_their_names() -> None:
    scores = {"scores": [[0.5] * QUESTIONS]}
    records = [record | scores for record in (BASE, *RIVALS, GOOD)]
    page = make_page([Run("x", results.summarise([header(metric="anls"), *records]))])
    assert ">ANLS %</text>" in page


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(TokenPruneError, match=r"needs Jinja2: pip install tokenprune-bench"):
        make_page([made()])


def test_the_templates_are_in_the_wheel() -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel")
    root = Path(__file__).parents[3] / "benchmarks"
    files = {file.relative_path for file in wheel.WheelBuilder(str(root)).recurse_included_files()}
    folder = root / "tokenprune_bench/report/templates"
    assert {path.relative_to(root).as_posix() for path in folder.iterdir()} <= files
