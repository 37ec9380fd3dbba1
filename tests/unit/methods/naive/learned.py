# SPDX-License-Identifier: Apache-2.0
"""learned: a loop written from its description."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table, next_pick
from method_rows import Picks


def naive_scores(x: Tensor, t: Tensor, weights: Mapping[str, Tensor], grid: tuple[int, int] | None) -> Tensor:
    """Return the score of each token of an image, float64. x: `[n, D]`, t: `[m, D]`, grid: rows and columns."""
    weight = {name: value.double() for name, value in weights.items()}
    mean, scores = x.mean(0), []
    asked = None
    if "question_weight" in weight:
        asked = ((t.mean(0) - weight["question_mean"]) / weight["question_std"]).clamp(-10, 10) / math.sqrt(x.shape[1])
    for index, token in enumerate(x):
        row, column = (0.0, 0.0)
        if grid is not None:
            row, column = (2 * i / (n - 1) - 1 for i, n in zip(divmod(index, grid[1]), grid, strict=True))
        norm = float(token.norm())
        cosine = float(token @ mean) / (norm * float(mean.norm()) + 1e-6)
        inputs = torch.cat([token, torch.tensor([row, column, math.log(norm + 1e-6), cosine], dtype=torch.float64)])
        scaled = ((inputs - weight["mean"]) / weight["std"]).clamp(-10, 10)
        score = 0.0
        for unit, incoming in enumerate(weight["hidden_weight"]):
            value = float(incoming @ scaled + weight["hidden_bias"][unit])
            outgoing = float(weight["out_weight"][unit])
            if asked is not None:
                outgoing += float(weight["question_weight"][unit] @ asked)
            score += outgoing * value * 0.5 * (1 + math.erf(value / math.sqrt(2)))
        scores.append(score)
    return torch.tensor(scores, dtype=torch.float64)


def naive(
    x: Tensor, t: Tensor, keep: int, weights: Mapping[str, Tensor] | None = None, grid: tuple[int, int] | None = None,
    diversity: float = 1.0, kept: Any = (), slack: float = 0.0, **_: Any,
) -> list[int]:  # fmt: skip
    score = torch.zeros(len(x), dtype=torch.float64) if weights is None else naive_scores(x, t, weights, grid)
    distance = 1 - cosine_table(x)
    nearest = distance.clone().fill_diagonal_(torch.inf).amin(0)
    picks: list[int] = []
    while len(picks) < keep:
        if diversity:
            value = (score / diversity).exp() * (distance[picks].amin(0) if picks else nearest)
        else:
            value = (score - score.max()).exp()
        picks.append(next_pick(value, picks, kept, slack))
    return picks


ROWS = {
    "learned": Picks(
        naive=naive,
        tried=({}, {"diversity": 4.0}),
        refused=({"diversity": -1.0}, {"diversity": 17.0}, {"diversity": "x"}, {"selector": 3}),
        unchanged=("length of tokens", "unit of tokens", "turn of tokens", "text"),
        slack=1e-4,
    )
}
