# SPDX-License-Identifier: Apache-2.0
"""Plots as PNG by matplotlib: of a benchmark, and the parts that those of experiments/ are made of."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenprune.errors import TokenPruneError
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.report.fronts import TOKENS, against_tokens_series
from tokenprune_bench.report.runs import Run
from tokenprune_bench.report.styles import Styles
from tokenprune_bench.results import UNPATCHED, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@contextmanager
def same_look() -> Iterator[None]:
    """Draw as matplotlib does without settings of the user's own, so that the same records give the same bytes; raises
    TokenPruneError without matplotlib."""
    try:
        from matplotlib import style
    except ImportError as error:
        raise TokenPruneError("plots need matplotlib: pip install tokenprune-bench") from error
    with style.context("default"):
        yield


def panels(titles: Sequence[str], width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels side by side, each of so many inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * len(titles), height), layout="constrained")
    row = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, fontsize=10)
    return figure, row


def curve(axes: Axes, points: Sequence[tuple[Any, ...]], label: str, **look: Any) -> None:
    """Draw a line through points (x, y), or (x, y, low, high) with an interval, in the order given."""
    x, y, *ends = zip(*points, strict=True)
    widths = [abs(np.subtract(y, end)) for end in ends] or None
    look = {"marker": ".", "linewidth": 1.5, "markersize": 5} | look
    _, caps, bars = axes.errorbar(x, y, yerr=widths, label=label, elinewidth=0.8, capsize=2, **look)
    # Methods at the same keep stand on the same spot of the axis, one over the other.
    for artist in (*caps, *bars):
        artist.set_alpha(0.3)


def level(axes: Axes, y: float, text: str) -> None:
    """Draw a horizontal line, with a text above its right end."""
    axes.axhline(y, color="black", linewidth=0.8)
    axes.annotate(
        text, (1, y), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, xytext=(-4, 2),
        textcoords="offset points",
    )  # fmt: skip


def png(figure: Figure, dpi: int = 150) -> bytes:
    """Return a figure as PNG, without the version of the software."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


@same_look()
def plot_png(results: Results) -> bytes:
    """Return a PNG: accuracy against layer-averaged visual tokens, one line a method, as on the page of the report;
    raises TokenPruneError without matplotlib."""
    whole, metric = results.baseline, METRICS[results.header.get("metric", "exact")]
    figure, (axes,) = panels([f"{results.header['environment']['model']}, {whole.questions} questions"], 8, 5)
    run = Run("", results)
    styles = Styles.of([run])
    for one in against_tokens_series(run, styles):
        (method,) = (name for name, look in styles.methods.items() if look == one.style)
        if method == UNPATCHED:
            continue
        points = sorted((point.x, point.y, point.low, point.high) for point in one.points)
        line = "--" if one.style.dashed else "-"
        curve(axes, points, method, marker=one.style.marker, color=one.style.colour, linestyle=line)
    level(axes, 100 * whole.overall.value, f"unpatched, {whole.tokens_in:.0f} tokens")
    scored = "accuracy in %" if metric.name == "exact" else metric.title
    axes.set(xlabel=TOKENS, ylabel=f"{scored}, with 95 % intervals")
    axes.grid(alpha=0.25)
    if len(results.rows) > 1:
        axes.legend(fontsize=8, ncols=2)
    return png(figure)


def write(path: str | Path, content: str | bytes) -> None:
    """Write a report; raises TokenPruneError where that is not possible."""
    path = Path(path)
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
