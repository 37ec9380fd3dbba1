# SPDX-License-Identifier: Apache-2.0
"""Draw what recall.py measured, and print it as tables.

python benchmarks/experiments/studies/recall_figure.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import calm_threads  # noqa: F401
import numpy as np
from recall import AGES, ALL, GUESS, ORACLES, OUT, POLICIES
from rich.table import Table
from rows import read

from tokenprune.cli.common import get_console
from tokenprune_bench.report.png import draw_curve, draw_level, to_png, use_default_style
from tokenprune_demo.drawn_streams import EVENT_KINDS, STREAM_CHANCE

FIGURE = Path(__file__).parents[3] / "docs/images/recall.png"
DRAWS = 2000
CHANCE = sum(STREAM_CHANCE[kind] for kind in EVENT_KINDS) / len(EVENT_KINDS)
WAYS = {"share": "tokens of the event held, %", "right": "right, %", "closed": "right with gaps closed, %"}


def cells(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return for each policy, memory and age means over streams with intervals of 95 %, from draws of streams.

    `share` counts sessions that were not followed further as 0; `right` and `closed` are of those that were asked,
    None where fewer than half were.
    """
    longest: dict[tuple[str, int, int], dict[str, Any]] = {}  # a stream may have been followed twice
    for row in sorted((row for row in rows if row["record"] == "stream"), key=lambda row: row["most"]):
        longest[row["policy"], row["memory"], row["stream"]] = row
    of, found = [row for row in longest.values() if row["policy"] != GUESS], {}
    for name in dict.fromkeys((row["policy"], row["memory"]) for row in of):
        for age in sorted({age for row in of for age in row["ages"]}):
            mine = [row for row in of if (row["policy"], row["memory"]) == name and row["most"] >= age]
            asked = [(row, row["ages"].index(age)) for row in mine if age in row["ages"]]
            if not mine or (name[0] in (ALL, *ORACLES) and not asked):
                continue
            held = [float(np.mean(row["share"][place])) for row, place in asked] + [0.0] * (len(mine) - len(asked))
            cell: dict[str, Any] = {"streams": len(mine), "asked": len(asked), "share": interval(held)}
            for way in ("right", "closed"):
                few = 2 * len(asked) < len(mine)
                cell[way] = None if few else interval([float(np.mean(row[way][place])) for row, place in asked])
            found[*name, age] = cell
    return found


def guessed(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return what was right before the event was shown."""
    of_streams = {row["stream"]: float(np.mean(row["right"][0])) for row in rows if row.get("policy") == GUESS}
    return interval([*of_streams.values()])


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return a mean and its interval of 95 %, from draws of the values."""
    rng, given = np.random.default_rng(0), np.asarray(values, float)
    low, high = np.percentile(given[rng.integers(0, len(given), (DRAWS, len(given)))].mean(1), (2.5, 97.5))
    return float(given.mean()), float(low), float(high)


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table of the shares, and one for each way to ask of what was right, in percent."""
    found, made = cells(rows), []
    ages = sorted({age for *_, age in found})
    for way, title in WAYS.items():
        table = Table("", "memory", *(str(age) for age in ages), title=title)
        for name in dict.fromkeys(key[:2] for key in found):
            shown = [found.get((*name, age), {}).get(way) for age in ages]
            table.add_row(name[0], str(name[1]), *("" if one is None else _percent(one) for one in shown))
        made.append(table)
    guesses = guessed(rows)
    said = {
        number: " ".join(words) for row in rows if row["record"] == "count" for number, words in row["said"].items()
    }
    made[-1].caption = f"asked before it was shown: {_percent(guesses)}; how many stars, by their number: {said}"
    return made


def _percent(one: tuple[float, float, float]) -> str:
    return "{:.0f} [{:.0f}, {:.0f}]".format(*(100 * value for value in one))


@use_default_style()
def drawn(rows: Sequence[dict[str, Any]]) -> bytes:
    """Return a figure: a column for each memory; above what is held, below what is answered right, gaps closed."""
    from matplotlib.figure import Figure

    found = cells(rows)
    memories = sorted({memory for _, memory, _ in found if memory})
    figure = Figure(figsize=(3.6 * len(memories), 6), layout="constrained")
    grid = figure.subplots(2, len(memories), squeeze=False, sharex=True, sharey=True)
    for of_way, way in zip(grid, ("share", "closed"), strict=True):
        for axes, memory in zip(of_way, memories, strict=True):
            for name in (*POLICIES, "event") if way == "closed" else POLICIES:
                here = [(place, found.get((name, memory, age))) for place, age in enumerate(AGES)]
                points = [(place, *(100 * one for one in cell[way])) for place, cell in here if cell and cell[way]]
                look = {"color": "black", "linestyle": ":"} if name == "event" else {}
                draw_curve(axes, points, "told what to keep" if name == "event" else name, **look)
            axes.set(ylim=(-3, 103))
            axes.grid(alpha=0.25)
        of_way[0].set_ylabel(WAYS[way])
    for axes, memory in zip(grid[0], memories, strict=True):
        axes.set_title(f"memory={memory}", fontsize=10)
    for axes in grid[1]:
        draw_level(axes, 100 * CHANCE, "chance")
        axes.set_xticks(range(len(AGES)), AGES)
        axes.set_xlabel("frames since it was shown")
    grid[1][-1].legend(fontsize=8)
    return to_png(figure, dpi=100)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=OUT)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = parser.parse_args(given)
    records = read(args.rows)[1]
    args.figure.write_bytes(drawn(records))
    for table in tables(records):
        get_console().print(table)


if __name__ == "__main__":
    main()
