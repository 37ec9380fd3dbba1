# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG with matplotlib: the plot of a benchmark, and helpers for the plots of experiments/."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenprune.errors import TokenPruneError
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.fronts import TOKENS, build_token_series
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles
from tokenprune_bench.results import UNPATCHED, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def use_default_style() -> Iterator[None]:
    """Context that ignores the user's matplotlib settings, so that equal records give equal bytes.

    Raises:
        TokenPruneError: If matplotlib is not installed.
    """
    try:
        from matplotlib import style
    except ImportError as error:
        raise TokenPruneError("Plots need matplotlib: pip install tokenprune-bench") from error
    with style.context("default"):
        yield


def create_panels(titles: Sequence[str], width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels side by side, each `width` by `height` inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    row = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, fontsize=10)
    return figure, row


def draw_curve(axes: Axes, points: Sequence[tuple[Any, ...]], label: str, **look: Any) -> None:
    """Draw a line through points (x, y) or (x, y, low, high), in the given order."""
    x, y, *ends = zip(*points, strict=True)
    widths = [abs(np.subtract(y, end)) for end in ends] or None
    look = {"marker": ".", "linewidth": 1.5, "markersize": 5} | look
    _, caps, bars = axes.errorbar(x, y, yerr=widths, label=label, elinewidth=0.8, capsize=2, **look)
    # Intervals of methods at the same keep overlap.
    for artist in (*caps, *bars):
        artist.set_alpha(0.3)


def draw_level(axes: Axes, y: float, text: str) -> None:
    """Draw a horizontal line with a text above its right end."""
    axes.axhline(y, color="black", linewidth=0.8)
    axes.annotate(
        text, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, xytext=(-4, 2),
        textcoords="offset points",
    )  # fmt: skip


def to_png(figure: Figure, dpi: int = 150) -> bytes:
    """Return a figure as PNG, without the version of the software."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


@use_default_style()
def plot_png(results: Results) -> bytes:
    """Return a PNG of accuracy against layer-averaged visual tokens, one line per method.

    Raises:
        TokenPruneError: If matplotlib is not installed.
    """
    baseline, metric = results.baseline, METRICS[results.header.get("metric", "exact")]
    figure, (axes,) = create_panels([f"{results.header['environment']['model']}, {baseline.questions} questions"], 8, 5)
    run = Run("", results)
    styles = Styles.from_runs([run])
    for series in build_token_series(run, styles):
        (method,) = (name for name, look in styles.methods.items() if look == series.style)
        if method == UNPATCHED:
            continue
        points = sorted((point.x, point.y, point.low, point.high) for point in series.points)
        line = "--" if series.style.dashed else "-"
        draw_curve(axes, points, method, marker=series.style.marker, color=series.style.colour, linestyle=line)
    draw_level(axes, 100 * baseline.overall.value, f"unpatched, {baseline.tokens_in:.0f} tokens")
    score_title = "accuracy in %" if metric.name == "exact" else metric.title
    axes.set(xlabel=TOKENS, ylabel=f"{score_title}, with 95 % intervals")
    axes.grid(alpha=0.25)
    if len(results.rows) > 1:
        axes.legend(fontsize=8, ncols=2)
    return to_png(figure)


def write(path: str | Path, content: str | bytes) -> None:
    """Write a report.

    Raises:
        TokenPruneError: If the file cannot be written.
    """
    path = Path(path)
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TokenPruneError(f"Cannot write {path}: {error.strerror or error}") from error
