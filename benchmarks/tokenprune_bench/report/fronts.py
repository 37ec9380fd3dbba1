# SPDX-License-Identifier: Apache-2.0
"""Pareto plots of accuracy against visual tokens and time to first token, of one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.compare import is_same_machine
from tokenprune_bench.report.plots import Plot, Point, Series, Style, build_pareto_plot
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles
from tokenprune_bench.results import UNPATCHED, Results, Row

TOKENS = "visual tokens, averaged over the decoder's layers"
XValue = tuple[float, str]  # x of a row, and its description


def plot_against_tokens(run: Run, styles: Styles) -> Plot | None:
    """Return the plot of accuracy against visual tokens per question."""
    return build_pareto_plot(
        "Accuracy against visual tokens", TOKENS, format_score_title(run.results), build_token_series(run, styles)
    )


def build_token_series(run: Run, styles: Styles) -> list[Series]:
    """Return the points of `plot_against_tokens`, one series per method."""
    return _build_series(run.results, _get_tokens, styles)


def plot_against_ttft(run: Run, styles: Styles) -> Plot | None:
    """Return the plot of accuracy against the time to first token, or None without timing.

    The x axis is a share of the unpatched time. The unpatched model is timed again with each method, because the speed
    of the machine may change.
    """
    unpatched_ms = run.results.unpatched_ms()
    if unpatched_ms is None:
        return None

    def get_x(row: Row) -> XValue | None:
        if row.method == UNPATCHED:
            return 100.0, f"{unpatched_ms:.4g} ms to the first token"
        if row.ttft_ratio is None:
            return None
        share, took = 100 * row.ttft_ratio, row.ttft_ratio * unpatched_ms
        return share, f"{share:.0f} % of the time to the first token ({took:.4g} ms)"

    title = f"time to first token, % of the unpatched {unpatched_ms:.4g} ms"
    return build_pareto_plot(
        "Accuracy against time to first token",
        title,
        format_score_title(run.results),
        _build_series(run.results, get_x, styles),
        100.0,
    )


def build_joint_plots(runs: Sequence[Run], styles: Styles) -> tuple[list[Plot], list[str]]:
    """Return the plots of runs with the same questions, and notes on plots that are not possible."""
    plots = [_build_joint_plot("Accuracy against visual tokens", TOKENS, runs, lambda run: _get_tokens, styles)]
    untimed = [run.label for run in runs if run.results.unpatched_ms() is None]
    if untimed:
        return plots, [f"No plot against time: {', '.join(untimed)} have no timing."]
    if not is_same_machine(runs):
        return plots, [
            "No plot against time: the runs were timed on different machines, or with different numbers of threads."
        ]
    title = "Accuracy against time to first token"
    return [*plots, _build_joint_plot(title, "time to first token, ms", runs, _make_ttft_getter, styles)], []


def format_score_title(results: Results) -> str:
    title = METRICS[results.header.get("metric", "exact")].title
    return title[0].upper() + title[1:]


def _get_tokens(row: Row) -> XValue:
    return row.tokens_average, f"{row.tokens_average:.0f} tokens"


def _make_ttft_getter(run: Run) -> Callable[[Row], XValue | None]:
    unpatched_ms = run.results.unpatched_ms()

    def get_x(row: Row) -> XValue | None:
        if row.method == UNPATCHED:
            return unpatched_ms, f"{unpatched_ms:.4g} ms to the first token"
        if row.ttft_ratio is None:
            return None
        took = row.ttft_ratio * unpatched_ms
        return took, f"{took:.4g} ms to the first token"

    return get_x


def _build_series(results: Results, get_x: Callable[[Row], XValue | None], styles: Styles) -> list[Series]:
    points: dict[str, list[Point]] = {}
    for row in results.rows:
        if (x := get_x(row)) is not None:
            points.setdefault(row.method, []).append(_point(row, *x))
    # In the order of the styles, so that unpatched and the baselines are drawn below the methods.
    return [Series(look, tuple(points[name])) for name, look in styles.methods.items() if name in points]


def _build_joint_plot(
    title: str,
    x_title: str,
    runs: Sequence[Run],
    get_x: Callable[[Run], Callable[[Row], XValue | None]],
    styles: Styles,
) -> Plot:
    series: list[Series] = []
    parts: list[tuple[Style, list[Point]]] = []
    for run in runs:
        points_by_method: dict[str, list[Point]] = {}
        for row in run.results.rows:
            if (x := get_x(run)(row)) is not None:
                points_by_method.setdefault(row.method, []).append(_point(row, *x, label=f"{run.label} "))
        series += [
            Series(styles.get_run_style(method, run.label), tuple(points))
            for method, points in points_by_method.items()
        ]
        parts.append((styles.runs[run.label], [point for points in points_by_method.values() for point in points]))
    return build_pareto_plot(title, x_title, format_score_title(runs[0].results), series, parts=parts)


def _point(row: Row, x: float, cost: str, label: str = "") -> Point:
    name = f"{label}{row.method}" + ("" if row.method == UNPATCHED else f" {row.keep:g}")
    share = row.overall
    text = f"{name}: {100 * share.value:.1f} [{100 * share.low:.1f}–{100 * share.high:.1f}] at {cost}"
    return Point(x, 100 * share.value, 100 * share.low, 100 * share.high, name, text)
