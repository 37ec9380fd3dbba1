# SPDX-License-Identifier: Apache-2.0
"""Naive loop of MustDrop (arXiv 2411.10803)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from method_rows import Cuts
from several_cuts import Arrived
from tokenprune import VisualTokens

Pair = tuple[float, float]
TINY = 2.0**-126  # smallest normal float32, in place of a threshold of 0


def drops(total: float, maximum: float, attention_sum: float, thresholds: Pair) -> bool:
    """Whether a token's share of the attention and its maximum are both below their thresholds."""
    return total < thresholds[0] * attention_sum and maximum < thresholds[1]


def stay(
    total: Sequence[float], maxima: Sequence[float], key: set[int], keep: int, thresholds: Pair | None
) -> list[int]:
    """Return the kept token indices. Tokens of the key set come first."""
    attention_sum, (g, i) = sum(total), thresholds or (1.0, 1.0)
    g, i = max(g, TINY), max(i, TINY)
    rank = [max(a / attention_sum / g, b / i) for a, b in zip(total, maxima, strict=True)]
    order = sorted(range(len(total)), key=lambda n: (n not in key, -rank[n], n))
    if thresholds is not None:
        order = [n for n in order if n in key or not drops(total[n], maxima[n], attention_sum, thresholds)] or [
            max(range(len(rank)), key=lambda n: (rank[n], -n))
        ]
    return sorted(order[:keep])


def naive(arrived: Arrived, decoder: Any, protected: float = 0.0) -> list[int]:
    """Apply stage 3, the dual-attention filter, without the vision tower's key set."""
    rows = arrived.text or [arrived.last]
    attention = [
        [sum(float(head[r, p]) for head in arrived.before) / len(arrived.before) for r in rows] for p in arrived.places
    ]
    kept = stay([sum(row) for row in attention], [max(row) for row in attention], set(), arrived.keep, None)
    return [arrived.places[n] for n in kept]


def ties(tokens: VisualTokens, cut: int, protected: float = 0.08, thresholds: Pair | None = None) -> list[list[int]]:
    expected = []
    for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
        total, maxima = tokens.text_sum_and_max[row, :, :count].double().tolist()
        key: set[int] = set()
        if protected:
            score = tokens.encoder_attention(-1)[row].mean(0)[:count].tolist()
            key = set(sorted(range(count), key=lambda n: (-score[n], n))[: math.ceil(protected * count)])
        expected.append(stay(total, maxima, key, keep, thresholds))
    return expected


ROWS = {
    "mustdrop": Cuts(
        naive=naive,
        tried=({"protected": 0.0},),
        refused=({"protected": 1.5}, {"protected": "x"}, {"thresholds": (1,)}, {"thresholds": (-1.0, 0.1)},
                 {"layers": (1, 2)}),
        layers=(1, 2, 3),
        ties=ties,
        tied=({}, {"protected": 0.0}, {"protected": 0.9}),
    )
}  # fmt: skip
