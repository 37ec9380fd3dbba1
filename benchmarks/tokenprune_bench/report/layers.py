# SPDX-License-Identifier: Apache-2.0
"""Visual tokens at each decoder layer: a small plot for each keep, and the same in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenprune_bench.report.plots import Plot, Style, curves
from tokenprune_bench.results import UNPATCHED, Results, Row


@dataclass(frozen=True)
class Layers:
    """The curves of one keep. curves_in_words: the methods that share a curve, the curve in words, its look."""

    plot: Plot
    curves_in_words: tuple[tuple[str, str, Style], ...]


def layer_plots(results: Results, style: Callable[[str], Style]) -> list[Layers]:
    """Return a plot for each keep, in the order of the run; none where the layers were not recorded.

    style: the look of a method.
    """
    made, whole = [], _per_layer(results.baseline)
    if not whole:
        return []
    rows = [row for row in results.rows[1:] if _per_layer(row)]
    top = max(value for row in (results.baseline, *rows) for value in _per_layer(row))
    for keep in dict.fromkeys(row.keep for row in rows):
        # Methods whose curves are the same share a line, and are named together.
        same: dict[tuple[float, ...], list[str]] = {}
        for row in rows:
            if row.keep == keep:
                same.setdefault(_per_layer(row), []).append(row.method)
        styles = [_shared([style(method) for method in methods]) for methods in same.values()]
        series = [(style(UNPATCHED), whole), *zip(styles, same, strict=True)]
        asked = "target" if results.equal_cost else "keep"
        title = f"{asked} {keep:g}" if keep <= 1 and isinstance(keep, float) else f"{asked} {keep:g} tokens"
        curves_in_words = tuple(
            (", ".join(methods), _in_words(values), look)
            for look, (values, methods) in zip(styles, same.items(), strict=True)
        )
        made.append(Layers(curves(title, "visual tokens of a question", series, top), curves_in_words))
    return made


def _shared(styles: list[Style]) -> Style:
    """Return the look of the first, lit up with any of them."""
    return replace(styles[0], tags=" ".join(look.tags for look in styles))


def _per_layer(row: Row) -> tuple[float, ...]:
    return tuple(round(value / row.questions, 1) for value in row.stats.get("visual_tokens_per_layer") or ())


def _in_words(values: tuple[float, ...]) -> str:
    """Return "256 in layers 1–2, 64 in 3–6"."""
    parts, start = [], 1
    for value, group in itertools.groupby(round(value) for value in values):
        end = start + len(list(group)) - 1
        parts.append(f"{value} in {'layer' if start == end else 'layers'} {start}" + (f"–{end}" if end > start else ""))
        start = end + 1
    if len(parts) == 1:
        return f"{round(values[0])} in every layer"
    return ", ".join(parts)
