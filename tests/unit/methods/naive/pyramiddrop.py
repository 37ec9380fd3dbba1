# SPDX-License-Identifier: Apache-2.0
"""pyramiddrop: a loop written from its description."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive(seen: Arrived, decoder: Any) -> list[int]:
    """Each cut is ranked by the layer behind it."""
    heads = len(seen.behind)
    score = {i: sum(float(seen.behind[h, seen.last, i]) for h in range(heads)) / heads for i in seen.places}
    return sorted(seen.places, key=lambda i: (-score[i], i))[: seen.keep]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    score = tokens.next_row_attention.mean(1).tolist()
    return [best(row[:n], k) for row, n, k in zip(score, tokens.counts, tokens.keep, strict=True)]


ROWS = {
    "pyramiddrop": Cuts(
        naive=naive,
        refused=(
            {"layers": (8, 8, 9)}, {"layers": (1, 2)}, {"layers": (0, 1, 2)}, {"layers": 3}, {"ratios": ()},
            {"ratios": (0.1, 0.5)}, {"ratios": (1.5,)}, {"ratios": ("a",)},
        ),
        families=("llava", "qwen2_5_vl"),
        layers=(1, 2, 3),
        ties=ties,
    )
}  # fmt: skip
