# SPDX-License-Identifier: Apache-2.0
"""Naive loop of EADP."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table, next_pick, unit
from method_rows import Picks


def naive_weight(x: Tensor, t: Tensor, alpha: float = 0.5, beta: float = 2.0, share: float = 0.2, sign: int = -1,
                 grid: tuple[int, int] | None = None) -> Tensor:  # fmt: skip
    """Return token weights: cosines to the pooled text and to the text tokens of lowest spatial entropy."""
    similarity = sign * unit(x) @ unit(t).T
    entropy = []
    for word in range(len(t)):
        p = torch.softmax(100 * similarity[:, word], 0)
        entropy.append(float(-(p * (p + 1e-12).log()).sum()))
    specific = sorted(range(len(t)), key=lambda j: (entropy[j], j))[: max(1, int(share * len(t)))]
    weight = torch.softmax(torch.tensor([-entropy[j] / (0.01 + 1e-6) for j in specific], dtype=torch.float64), 0)
    local = sum(w * similarity[:, j] for w, j in zip(weight, specific, strict=True))
    score = alpha * sign * unit(x) @ unit(t.mean(0)) + (1 - alpha) * local
    score = (score - score.min() + 1e-6) / (score.max() - score.min() + 1e-6)
    if grid:
        score = naive_blur(score.view(grid)).flatten()
    return score**beta


def naive_blur(cells: Tensor) -> Tensor:
    """Blur with a 3 x 3 Gaussian (sigma 1) and reflect padding."""
    height, width = cells.shape
    out = torch.zeros_like(cells)
    for row in range(height):
        for column in range(width):
            total = weights = 0.0
            for a in (-1, 0, 1):
                for b in (-1, 0, 1):
                    r, c = abs(row + a), abs(column + b)
                    r, c = min(r, 2 * (height - 1) - r), min(c, 2 * (width - 1) - c)
                    gaussian = math.exp(-(a * a + b * b) / 2)
                    total, weights = total + gaussian * float(cells[r, c]), weights + gaussian
            out[row, column] = total / weights
    return out


def naive(x: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, z: Any = None, a: Any = None,
          **options: Any) -> list[int]:  # fmt: skip
    """Greedy facility location on the weighted similarities (cos + 1) / 2."""
    weight = naive_weight(x, t, **options) if len(t) else torch.ones(len(x))
    similarity, picks = (cosine_table(x) + 1) / 2, []
    cover = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(keep):
        picks.append(next_pick((weight * (similarity - cover).clamp(min=0)).sum(1), picks, kept, slack))
        cover = torch.maximum(cover, similarity[picks[-1]])
    return picks


ROWS = {
    "eadp": Picks(
        naive=naive,
        tried=({}, {"sign": 1, "share": 0.5}, {"alpha": 0, "beta": 1}, {"alpha": 1}),
        refused=({"alpha": 2}, {"beta": -1}, {"share": 0}, {"sign": 2}, {"smooth": 1}),
        unchanged=("length of tokens",),
        slack=1e-3,
    )
}
