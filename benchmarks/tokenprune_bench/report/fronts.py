# SPDX-License-Identifier: Apache-2.0
"""The Pareto plots: accuracy against visual tokens and against the time to the first token, of one run or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.compare import same_machine
from tokenprune_bench.report.plots import Plot, Point, Series, Style, pareto
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles
from tokenprune_bench.results import UNPATCHED, Results, Row

TOKENS = "visual tokens, averaged over the decoder's layers"
Place = tuple[float, str]  # where a row stands on the x axis, and that in words


def against_tokens(run: Run, styles: Styles) -> Plot | None:
    """Accuracy against visual tokens of a question."""
    return pareto("Accuracy against visual tokens", TOKENS, scored(run.results), against_tokens_series(run, styles))


def against_tokens_series(run: Run, styles: Styles) -> list[Series]:
    """Return the points of `against_tokens`, a series for each method."""
    return _series(run.results, _tokens, styles)


def against_ttft(run: Run, styles: Styles) -> Plot | None:
    """Accuracy against the time to the first token, as a share of the unpatched model's; None where nothing was timed.

    Shares, because the unpatched model was timed anew, in turn with each method, and the machine may change its pace.
    """
    whole = run.results.unpatched_ms()
    if whole is None:
        return None

    def place(row: Row) -> Place | None:
        if row.method == UNPATCHED:
            return 100.0, f"{whole:.4g} ms to the first token"
        if row.ttft_ratio is None:
            return None
        share, took = 100 * row.ttft_ratio, row.ttft_ratio * whole
        return share, f"{share:.0f} % of the time to the first token ({took:.4g} ms)"

    title = f"time to first token, % of the unpatched {whole:.4g} ms"
    return pareto(
        "Accuracy against time to first token", title, scored(run.results), _series(run.results, place, styles), 100.0
    )


def joint_plots(runs: Sequence[Run], styles: Styles) -> tuple[list[Plot], list[str]]:
    """Return the plots of runs that asked the same questions, and what cannot be drawn, in words."""
    plots = [_joint("Accuracy against visual tokens", TOKENS, runs, lambda run: _tokens, styles)]
    untimed = [run.label for run in runs if run.results.unpatched_ms() is None]
    if untimed:
        return plots, [f"No plot against time: {', '.join(untimed)} took no times."]
    if not same_machine(runs):
        return plots, ["No plot against time: the runs were timed on different machines, or with other threads."]
    title = "Accuracy against time to first token"
    return [*plots, _joint(title, "time to first token, ms", runs, _milliseconds, styles)], []


def scored(results: Results) -> str:
    title = METRICS[results.header.get("metric", "exact")].title
    return title[0].upper() + title[1:]


def _tokens(row: Row) -> Place:
    return row.tokens_average, f"{row.tokens_average:.0f} tokens"


def _milliseconds(run: Run) -> Callable[[Row], Place | None]:
    whole = run.results.unpatched_ms()

    def place(row: Row) -> Place | None:
        if row.method == UNPATCHED:
            return whole, f"{whole:.4g} ms to the first token"
        if row.ttft_ratio is None:
            return None
        took = row.ttft_ratio * whole
        return took, f"{took:.4g} ms to the first token"

    return place


def _series(results: Results, place: Callable[[Row], Place | None], styles: Styles) -> list[Series]:
    points: dict[str, list[Point]] = {}
    for row in results.rows:
        if (where := place(row)) is not None:
            points.setdefault(row.method, []).append(_point(row, *where))
    # In the order of the styles: what every page has (unpatched, baselines) lies below the rest.
    return [Series(look, tuple(points[name])) for name, look in styles.methods.items() if name in points]


def _joint(
    title: str, x_title: str, runs: Sequence[Run], place: Callable[[Run], Callable[[Row], Place | None]], styles: Styles
) -> Plot:
    series: list[Series] = []
    parts: list[tuple[Style, list[Point]]] = []
    for run in runs:
        own: dict[str, list[Point]] = {}
        for row in run.results.rows:
            if (where := place(run)(row)) is not None:
                own.setdefault(row.method, []).append(_point(row, *where, label=f"{run.label} "))
        series += [Series(styles.of_run(method, run.label), tuple(points)) for method, points in own.items()]
        parts.append((styles.runs[run.label], [point for points in own.values() for point in points]))
    return pareto(title, x_title, scored(runs[0].results), series, parts=parts)


def _point(row: Row, x: float, cost: str, label: str = "") -> Point:
    name = f"{label}{row.method}" + ("" if row.method == UNPATCHED else f" {row.keep:g}")
    share = row.overall
    text = f"{name}: {100 * share.value:.1f} [{100 * share.low:.1f}–{100 * share.high:.1f}] at {cost}"
    return Point(x, 100 * share.value, 100 * share.low, 100 * share.high, name, text)
