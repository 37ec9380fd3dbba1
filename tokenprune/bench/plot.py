# SPDX-License-Identifier: Apache-2.0
"""The plot of a benchmark as a PNG, and writing what was made to a file."""

from __future__ import annotations

import io
from pathlib import Path

from tokenprune.bench.metrics import METRICS
from tokenprune.bench.results import MARKS, UNPATCHED, Results, Row
from tokenprune.errors import TokenPruneError

_MARKERS = "osD^vP*X<>hdp"


def plot_png(results: Results) -> bytes:
    """Return a PNG: accuracy against layer-averaged visual tokens, one line a method; raises TokenPruneError without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TokenPruneError("plots need matplotlib: pip install 'tokenprune-vlm[bench]'") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, list[Row]] = {}
    for row in results.rows:
        if row.method != UNPATCHED:
            lines.setdefault(row.method, []).append(row)
    for index, (method, rows) in enumerate(lines.items()):
        rows = sorted(rows, key=lambda row: row.tokens_average)
        shares = [row.overall for row in rows]
        baseline = method in MARKS
        _, caps, bars = axes.errorbar(
            [row.tokens_average for row in rows],
            [100 * share.value for share in shares],
            yerr=[[100 * (s.value - s.low) for s in shares], [100 * (s.high - s.value) for s in shares]],
            label=method,
            marker=_MARKERS[index % len(_MARKERS)],
            color=("0.25" if method == "random" else "0.55") if baseline else f"C{index % 10}",
            linestyle="--" if baseline else "-",
            linewidth=1.5,
            markersize=5,
            elinewidth=0.8,
            capsize=2,
        )
        # Methods at the same keep stand on the same spot of the axis, one over the other.
        for artist in (*caps, *bars):
            artist.set_alpha(0.3)
    whole = results.baseline
    axes.axhline(100 * whole.overall.value, color="black", linewidth=0.8)
    axes.annotate(
        f"unpatched, {whole.tokens_in:.0f} tokens", (1, 100 * whole.overall.value), xycoords=("axes fraction", "data"),
        ha="right", va="bottom", fontsize=8, xytext=(-4, 2), textcoords="offset points",
    )  # fmt: skip
    metric = METRICS[results.header.get("metric", "exact")]
    scored = "accuracy in %" if metric.name == "exact" else metric.title
    axes.set(xlabel="visual tokens, averaged over the decoder's layers", ylabel=f"{scored}, with 95 % intervals")
    axes.set_title(f"{results.header['environment']['model']}, {whole.questions} questions", fontsize=10)
    axes.grid(alpha=0.25)
    if lines:
        axes.legend(fontsize=8, ncols=2)
    buffer = io.BytesIO()
    # No software version in the file: the same records give the same bytes.
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def write(path: str | Path, content: str | bytes) -> None:
    """Write a report; raises TokenPruneError where that is not possible."""
    path = Path(path)
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
