# SPDX-License-Identifier: Apache-2.0
"""mustdrop: a loop written from its description."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from method_rows import Cuts
from several_cuts import Arrived
from tokenprune import VisualTokens

Pair = tuple[float, float]
TINY = 2.0**-126  # a threshold of nothing: what is below it comes in order of what it is


def drops(total: float, most: float, everything: float, thresholds: Pair) -> bool:
    return total < thresholds[0] * everything and most < thresholds[1]


def stay(total: Sequence[float], most: Sequence[float], key: set[int], keep: int, thresholds: Pair | None) -> list[int]:
    """Of tokens by number; those of the key set come first."""
    everything, (g, i) = sum(total), thresholds or (1.0, 1.0)
    g, i = max(g, TINY), max(i, TINY)
    rank = [max(a / everything / g, b / i) for a, b in zip(total, most, strict=True)]
    order = sorted(range(len(total)), key=lambda n: (n not in key, -rank[n], n))
    if thresholds is not None:
        order = [n for n in order if n in key or not drops(total[n], most[n], everything, thresholds)] or [
            max(range(len(rank)), key=lambda n: (rank[n], -n))
        ]
    return sorted(order[:keep])


def naive(seen: Arrived, decoder: Any, protected: float = 0.0) -> list[int]:
    """In a model, without the tower's key set."""
    rows = seen.text or [seen.last]
    words = [[sum(float(head[r, p]) for head in seen.before) / len(seen.before) for r in rows] for p in seen.places]
    found = stay([sum(one) for one in words], [max(one) for one in words], set(), seen.keep, None)
    return [seen.places[n] for n in found]


def ties(tokens: VisualTokens, cut: int, protected: float = 0.08, thresholds: Pair | None = None) -> list[list[int]]:
    found = []
    for row, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
        total, most = tokens.text_sum_and_max[row, :, :count].double().tolist()
        key: set[int] = set()
        if protected:
            score = tokens.encoder_attention(-1)[row].mean(0)[:count].tolist()
            key = set(sorted(range(count), key=lambda n: (-score[n], n))[: math.ceil(protected * count)])
        found.append(stay(total, most, key, keep, thresholds))
    return found


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
