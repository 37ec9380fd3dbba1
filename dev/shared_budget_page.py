# SPDX-License-Identifier: Apache-2.0
"""Generated part of docs/results/accuracy.md: shares of a budget among the images of a prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rows
from tables import format_table

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "benchmarks/results/shared_budget.jsonl"
WAYS = {"compete": '`per="prompt"`', "entropy": "by entropy", "detail": "by detail"}
DRAWS = 2000


def shares() -> str:
    """Return accuracy with equal shares, and the gain of other shares."""
    header, records = rows.read(FILE)
    titles = ["images, keep", "equal shares, %", *WAYS.values(), f"documents, {WAYS['compete']}"]
    titles.append("documents, by entropy")
    lines = []
    for num_images, keep in sorted(
        {(row["images"], row["keep"]) for row in records}, key=lambda setting: (setting[0], -setting[1])
    ):
        rows_of_setting = [row for row in records if (row["images"], row["keep"]) == (num_images, keep)]
        equal = _right(rows_of_setting, "equal")
        cells = [
            f"{100 * sum(map(sum, equal)) / sum(map(len, equal)):.1f}",
            *(_gain(rows_of_setting, way) for way in WAYS),
        ]
        cells += [_gain(rows_of_setting, way, "document") for way in ("compete", "entropy")]
        lines.append([f"{num_images}, {keep:g}", *cells])
    about = (
        f"{header['model'].partition(' ')[0]} and `divprune`, {4 * header['images']} images in prompts. Gains in "
        "points over equal shares; bold if the 95 % interval excludes 0. By "
        "`python benchmarks/experiments/shared_budget.py`; [raw data](../../benchmarks/results/shared_budget.jsonl)."
    )
    return f"{about}\n\n{format_table(titles, lines, left=1)}"


def _right(rows: Sequence[dict[str, Any]], way: str, kind: str = "") -> list[list[int]]:
    """Return 1 or 0 per question for each prompt, of images of one kind or of all."""
    return [
        [
            int(digit)
            for kind_of_image, said in zip(row["kinds"], row["right"][way], strict=True)
            if kind in ("", kind_of_image)
            for digit in said
        ]
        for row in rows
    ]


def _gain(rows: Sequence[dict[str, Any]], way: str, kind: str = "") -> str:
    pairs = [
        (sum(after) - sum(before), len(before))
        for before, after in zip(_right(rows, "equal", kind), _right(rows, way, kind), strict=True)
    ]
    rng = random.Random(0)
    drawn = sorted(_share(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    low, high = drawn[int(0.025 * DRAWS)], drawn[int(0.975 * DRAWS)]
    return f"**{_share(pairs):+.1f}**" if low > 0 or high < 0 else f"{_share(pairs):+.1f}"


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    return 100 * sum(gain for gain, _ in pairs) / max(1, sum(count for _, count in pairs))
