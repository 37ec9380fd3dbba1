# SPDX-License-Identifier: Apache-2.0
"""Visual tokens per decoder layer: a small plot for each keep, and a description."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenprune_bench.report.plots import Plot, Style, build_layer_curves
from tokenprune_bench.results import UNPATCHED, Results, Row


@dataclass(frozen=True)
class Layers:
    """Curves of one keep.

    Attributes:
        plot: The plot.
        curves_in_words: For each curve its methods, its description and its style.
    """

    plot: Plot
    curves_in_words: tuple[tuple[str, str, Style], ...]


def build_layer_plots(results: Results, style: Callable[[str], Style]) -> list[Layers]:
    """Return a plot for each keep, in the order of the run. Empty if the run did not record layers.

    Args:
        results: Results of the run.
        style: Returns the style of a method.
    """
    plots, unpatched = [], _compute_layer_averages(results.baseline)
    if not unpatched:
        return []
    rows = [row for row in results.rows[1:] if _compute_layer_averages(row)]
    top = max(value for row in (results.baseline, *rows) for value in _compute_layer_averages(row))
    for keep in dict.fromkeys(row.keep for row in rows):
        # Methods with equal curves share a line.
        same: dict[tuple[float, ...], list[str]] = {}
        for row in rows:
            if row.keep == keep:
                same.setdefault(_compute_layer_averages(row), []).append(row.method)
        styles = [_merge_styles([style(method) for method in methods]) for methods in same.values()]
        series = [(style(UNPATCHED), unpatched), *zip(styles, same, strict=True)]
        keep_name = "target" if results.equal_cost else "keep"
        title = f"{keep_name} {keep:g}" if keep <= 1 and isinstance(keep, float) else f"{keep_name} {keep:g} tokens"
        curves_in_words = tuple(
            (", ".join(methods), _format_layer_ranges(values), look)
            for look, (values, methods) in zip(styles, same.items(), strict=True)
        )
        plots.append(Layers(build_layer_curves(title, "visual tokens of a question", series, top), curves_in_words))
    return plots


def _merge_styles(styles: list[Style]) -> Style:
    """Return the first style with the tags of all styles, so that each of these methods highlights it."""
    return replace(styles[0], tags=" ".join(look.tags for look in styles))


def _compute_layer_averages(row: Row) -> tuple[float, ...]:
    return tuple(round(value / row.questions, 1) for value in row.stats.get("visual_tokens_per_layer") or ())


def _format_layer_ranges(values: tuple[float, ...]) -> str:
    """Return "256 in layers 1–2, 64 in 3–6"."""
    parts, start = [], 1
    for value, group in itertools.groupby(round(value) for value in values):
        end = start + len(list(group)) - 1
        parts.append(f"{value} in {'layer' if start == end else 'layers'} {start}" + (f"–{end}" if end > start else ""))
        start = end + 1
    if len(parts) == 1:
        return f"{round(values[0])} in every layer"
    return ", ".join(parts)
