# SPDX-License-Identifier: Apache-2.0
"""feather: a loop written from its description."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive_even(grid: tuple[int, int] | None, count: int, keep: int, stride: int = 3) -> list[int]:
    """Every stride-th row and column, the first among them, of as small a stride as takes at most half."""
    while True:
        if grid is None:
            places = list(range(0, count, stride * stride))
        else:
            places = [r * grid[1] + c for r in range(0, grid[0], stride) for c in range(0, grid[1], stride)]
        if len(places) <= keep // 2:
            return places
        if stride > count:
            return []
        stride += 1


LAYERS = (1, 2)


def naive(seen: Arrived, decoder: Any) -> list[int]:
    """By a grid, and by what is attended to without positions."""
    layer, heads = decoder.layers[LAYERS[seen.number] - 1], len(seen.before)
    x = layer.input_layernorm(seen.previous)
    q, k = layer.self_attn.q_proj(x[seen.last]), layer.self_attn.k_proj(x[seen.places])
    q = q.view(heads, -1)
    k = k.view(len(seen.places), -1, q.shape[1])
    score = [0.0] * len(seen.places)
    for h in range(heads):
        own = k[:, h * k.shape[1] // heads] @ q[h] / q.shape[1] ** 0.5
        for i, one in enumerate(own.softmax(0).tolist()):
            score[i] += one / heads
    even = naive_even((6, 6), 36, seen.keep) if seen.number == 0 else []
    rest = [i for i in range(len(seen.places)) if i not in even]
    return [seen.places[i] for i in even + best(score, seen.keep - len(even), rest)]


def ties(tokens: VisualTokens, cut: int, stride: int | None = 3) -> list[list[int]]:
    """Of images whose grid nobody knows."""
    found = []
    for row, (n, k) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
        attention = tokens.unrotated_last_row[row, :, :n].float()
        score = (attention / attention.sum(1, keepdim=True)).mean(0).tolist()
        even = naive_even(None, n, k) if cut == 0 and stride else []
        found.append(sorted(even + best(score, k - len(even), [i for i in range(n) if i not in even])))
    return found


ROWS = {
    "feather": Cuts(
        naive=naive,
        refused=({"stride": 0}, {"stride": 1.5}, {"second": 0.0}, {"second": 2}, {"layers": (3,)}),
        layers=LAYERS,
        ties=ties,
        tied=({}, {"stride": None}),
    )
}
