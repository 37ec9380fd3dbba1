# SPDX-License-Identifier: Apache-2.0
"""Naive loop of PyramidDrop (arXiv 2410.17247)."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive(arrived: Arrived, decoder: Any) -> list[int]:
    """Rank by the last token's mean attention in the layer after the cut."""
    heads = len(arrived.behind)
    score = {i: sum(float(arrived.behind[h, arrived.last, i]) for h in range(heads)) / heads for i in arrived.places}
    return sorted(arrived.places, key=lambda i: (-score[i], i))[: arrived.keep]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    score = tokens.next_row_attention.mean(1).tolist()
    return [best(row[:count], num_kept) for row, count, num_kept in zip(score, tokens.counts, tokens.keep, strict=True)]


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
