# SPDX-License-Identifier: Apache-2.0
"""Draw the figure of recall.py's raw file, and print its tables.

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
    """Return means over streams with bootstrapped 95 % intervals, by policy, memory size and age.

    `share` counts discontinued sessions as 0. `right` and `closed` are over the sessions that were asked, and None if
    fewer than half were.
    """
    longest: dict[tuple[str, int, int], dict[str, Any]] = {}  # the file may have a stream twice
    for row in sorted((row for row in rows if row["record"] == "stream"), key=lambda row: row["most"]):
        longest[row["policy"], row["memory"], row["stream"]] = row
    stream_rows, cells_by_key = [row for row in longest.values() if row["policy"] != GUESS], {}
    for name in dict.fromkeys((row["policy"], row["memory"]) for row in stream_rows):
        for age in sorted({age for row in stream_rows for age in row["ages"]}):
            rows_of_name = [row for row in stream_rows if (row["policy"], row["memory"]) == name and row["most"] >= age]
            answered = [(row, row["ages"].index(age)) for row in rows_of_name if age in row["ages"]]
            if not rows_of_name or (name[0] in (ALL, *ORACLES) and not answered):
                continue
            shares = [float(np.mean(row["share"][index])) for row, index in answered] + [0.0] * (
                len(rows_of_name) - len(answered)
            )
            cell: dict[str, Any] = {
                "streams": len(rows_of_name),
                "asked": len(answered),
                "share": compute_interval(shares),
            }
            for way in ("right", "closed"):
                too_few = 2 * len(answered) < len(rows_of_name)
                cell[way] = (
                    None if too_few else compute_interval([float(np.mean(row[way][index])) for row, index in answered])
                )
            cells_by_key[*name, age] = cell
    return cells_by_key


def guessed(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the share of right answers before the event, with its interval."""
    of_streams = {row["stream"]: float(np.mean(row["right"][0])) for row in rows if row.get("policy") == GUESS}
    return compute_interval([*of_streams.values()])


def compute_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return a mean and its bootstrapped 95 % interval."""
    rng, array = np.random.default_rng(0), np.asarray(values, float)
    low, high = np.percentile(array[rng.integers(0, len(array), (DRAWS, len(array)))].mean(1), (2.5, 97.5))
    return float(array.mean()), float(low), float(high)


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table of the shares, and a table of right answers in percent for each way to ask."""
    cells_by_key, all_tables = cells(rows), []
    ages = sorted({age for *_, age in cells_by_key})
    for way, title in WAYS.items():
        table = Table("", "memory", *(str(age) for age in ages), title=title)
        for name in dict.fromkeys(key[:2] for key in cells_by_key):
            row_intervals = [cells_by_key.get((*name, age), {}).get(way) for age in ages]
            table.add_row(
                name[0],
                str(name[1]),
                *("" if interval_of_cell is None else _percent(interval_of_cell) for interval_of_cell in row_intervals),
            )
        all_tables.append(table)
    guesses = guessed(rows)
    counts = {
        count: " ".join(words) for row in rows if row["record"] == "count" for count, words in row["said"].items()
    }
    all_tables[
        -1
    ].caption = f"asked before the event: {_percent(guesses)}; answered number of stars, by true number: {counts}"
    return all_tables


def _percent(mean_and_interval: tuple[float, float, float]) -> str:
    return "{:.0f} [{:.0f}, {:.0f}]".format(*(100 * value for value in mean_and_interval))


@use_default_style()
def draw_figure(rows: Sequence[dict[str, Any]]) -> bytes:
    """Draw a figure with a column per memory size: shares above, right answers with gaps closed below."""
    from matplotlib.figure import Figure

    cells_by_key = cells(rows)
    memories = sorted({memory for _, memory, _ in cells_by_key if memory})
    figure = Figure(figsize=(3.6 * len(memories), 6), layout="constrained")
    grid = figure.subplots(2, len(memories), squeeze=False, sharex=True, sharey=True)
    for of_way, way in zip(grid, ("share", "closed"), strict=True):
        for axes, memory in zip(of_way, memories, strict=True):
            for name in (*POLICIES, "event") if way == "closed" else POLICIES:
                by_age = [(index, cells_by_key.get((name, memory, age))) for index, age in enumerate(AGES)]
                points = [
                    (index, *(100 * value for value in cell[way])) for index, cell in by_age if cell and cell[way]
                ]
                look = {"color": "black", "linestyle": ":"} if name == "event" else {}
                draw_curve(axes, points, "oracle" if name == "event" else name, **look)
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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=OUT)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    args = parser.parse_args(argv)
    records = read(args.rows)[1]
    args.figure.write_bytes(draw_figure(records))
    for table in tables(records):
        get_console().print(table)


if __name__ == "__main__":
    main()
