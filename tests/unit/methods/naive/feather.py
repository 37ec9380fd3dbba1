# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FEATHER (arXiv 2412.13180)."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive_even(grid: tuple[int, int] | None, count: int, keep: int, stride: int = 3) -> list[int]:
    """Return every stride-th row and column from 0. The stride grows until they use at most half of `keep`."""
    while True:
        if grid is None:
            indices = list(range(0, count, stride * stride))
        else:
            indices = [r * grid[1] + c for r in range(0, grid[0], stride) for c in range(0, grid[1], stride)]
        if len(indices) <= keep // 2:
            return indices
        if stride > count:
            return []
        stride += 1


LAYERS = (1, 2)


def naive(arrived: Arrived, decoder: Any) -> list[int]:
    """Keep a uniform grid at the first cut, then the highest last-token attention without RoPE, over visual columns."""
    layer, heads = decoder.layers[LAYERS[arrived.number] - 1], len(arrived.before)
    x = layer.input_layernorm(arrived.previous)
    q, k = layer.self_attn.q_proj(x[arrived.last]), layer.self_attn.k_proj(x[arrived.places])
    q = q.view(heads, -1)
    k = k.view(len(arrived.places), -1, q.shape[1])
    score = [0.0] * len(arrived.places)
    for h in range(heads):
        logits = k[:, h * k.shape[1] // heads] @ q[h] / q.shape[1] ** 0.5
        for i, share in enumerate(logits.softmax(0).tolist()):
            score[i] += share / heads
    even = naive_even((6, 6), 36, arrived.keep) if arrived.number == 0 else []
    rest = [i for i in range(len(arrived.places)) if i not in even]
    return [arrived.places[i] for i in even + best(score, arrived.keep - len(even), rest)]


def ties(tokens: VisualTokens, cut: int, stride: int | None = 3) -> list[list[int]]:
    """Expected tokens of images with an unknown grid."""
    expected = []
    for row, (count, num_kept) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
        attention = tokens.unrotated_last_row[row, :, :count].float()
        score = (attention / attention.sum(1, keepdim=True)).mean(0).tolist()
        even = naive_even(None, count, num_kept) if cut == 0 and stride else []
        expected.append(sorted(even + best(score, num_kept - len(even), [i for i in range(count) if i not in even])))
    return expected


ROWS = {
    "feather": Cuts(
        naive=naive,
        refused=({"stride": 0}, {"stride": 1.5}, {"second": 0.0}, {"second": 2}, {"layers": (3,)}),
        layers=LAYERS,
        ties=ties,
        tied=({}, {"stride": None}),
    )
}
