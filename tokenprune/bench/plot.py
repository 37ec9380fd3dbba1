# SPDX-License-Identifier: Apache-2.0
"""The plot of a benchmark and its HTML report, a single file without links to anything."""

from __future__ import annotations

import base64
import html
import io
import json
from pathlib import Path

from tokenprune.bench.metrics import METRICS
from tokenprune.bench.results import MARKS, UNPATCHED, Results, Row
from tokenprune.bench.tables import tables, to_html
from tokenprune.errors import TokenPruneError

_MARKERS = "osD^vP*X<>hdp"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e2e2e2; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.bad { color: #b00020; font-weight: 600; }
h2 { font-size: 17px; margin-top: 2rem; } p { color: #555; font-size: 13px; max-width: 60rem; }
img { max-width: 100%; } pre { font-size: 12px; background: #f6f6f6; padding: 1rem; overflow-x: auto; }
"""


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


def html_report(results: Results) -> str:
    """Return a whole HTML page: tables, plot and the configuration of the run."""
    picture = base64.b64encode(plot_png(results)).decode()
    config = html.escape(json.dumps({k: v for k, v in results.header.items() if k != "kind_of_question"}, indent=1))
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>tokenprune benchmark</title>\n"
        f"<style>{_STYLE}</style>\n<h1>tokenprune benchmark</h1>\n"
        + "\n".join(to_html(table) for table in tables(results))
        + "\n<h2>Accuracy against visual tokens</h2>\n"
        + f'<img alt="accuracy against visual tokens" src="data:image/png;base64,{picture}">'
        + f"\n<h2>Run</h2>\n<pre>{config}</pre>\n</html>\n"
    )


def write(path: str | Path, content: str | bytes) -> None:
    """Write a report; raises TokenPruneError where that is not possible."""
    path = Path(path)
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise TokenPruneError(f"cannot write {path}: {error.strerror or error}") from error
