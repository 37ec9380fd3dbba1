# SPDX-License-Identifier: Apache-2.0
"""cdpruner and divprune, also without the mean (Cen-Prune): loops written from their descriptions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table, next_pick, unit
from method_rows import Picks


def naive_centred(x: Tensor, z: Tensor, center: Any) -> tuple[Tensor, Tensor]:
    """Cosines without the mean, and how distinct each token is."""
    x = z if center == "tower" else x
    if center in ("tower", "standardised"):
        x = x / (x.var(0, unbiased=False) + 1e-6).sqrt()
    alike, count = cosine_table(x), len(x)
    others = [[float(alike[i, j]) for j in range(count) if j != i] for i in range(count)]
    distinct = torch.tensor([-sum(one) / max(1, count - 1) for one in others])
    if center is True:
        distinct = (distinct - distinct.min()) / (distinct.max() - distinct.min())
    else:
        distinct = 1 / (1 + torch.exp(-(distinct - distinct.mean()) / (distinct.std(unbiased=False) + 1e-6)))
    return cosine_table(x - x.mean(0)), distinct.double()


def naive_relevance(x: Tensor, t: Tensor, sign: int, theta: float) -> Tensor:
    relevant = torch.stack([sign * sum(unit(one) @ unit(word) for word in t) / len(t) for one in x])
    relevant = (relevant - relevant.min() + 1e-6) / (relevant.max() - relevant.min())
    return relevant if theta == 1 else torch.exp(theta / (2 * (1 - theta)) * relevant)


def naive(x: Tensor, z: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, sign: int = 1,
          theta: float = 0.5, center: Any = False, a: Any = None) -> list[int]:  # fmt: skip
    alike, weight = cosine_table(x), naive_relevance(x, t, sign, theta)
    if center:
        alike, distinct = naive_centred(x, z, center)
        weight = weight * distinct
    kernel = weight[:, None] * alike * weight
    left, rows, picks = kernel.diagonal().clone(), [], []
    for _ in range(keep):
        j = next_pick(torch.where(left > 1e-5 * kernel.diagonal(), left, -1 / (1e-30 + weight)), picks, kept, slack)
        if left[j] > 1e-5 * kernel[j, j]:
            explained = torch.stack([row[j] * row for row in rows]).sum(0) if rows else 0
            rows.append((kernel[j] - explained) / left[j].sqrt())
            left = left - rows[-1] ** 2
        picks.append(j)
    return picks


def naive_divprune(
    x: Tensor, z: Tensor, keep: int, center: Any = False, kept: Any = (), slack: float = 0.0, **_: Any
) -> list[int]:
    alike, distinct = naive_centred(x, z, center) if center else (cosine_table(x), 1)
    distance = 1 - alike
    others = distance.clone().fill_diagonal_(torch.inf)
    picks = [next_pick(others.amin(0), [], kept, slack)]
    while len(picks) < keep:
        picks.append(next_pick(distinct * distance[picks].amin(0), picks, kept, slack))
    return picks


ROWS = {
    "cdpruner": Picks(
        naive=naive,
        tried=(
            {}, {"theta": 1.0, "sign": -1}, {"center": True, "theta": 1.0}, {"center": "standardised"},
            {"center": "tower"},
        ),
        refused=({"sign": 0}, {"sign": True}, {"theta": 1.5}, {"theta": math.nan}, {"center": "yes"}),
        unchanged=("length of tokens", "unit of tokens"),
        slack=1e-3,
    ),
    "divprune": Picks(
        naive=naive_divprune,
        tried=({}, {"center": True}, {"center": "standardised"}, {"center": "tower"}),
        refused=({"center": "yes"},),
        unchanged=("length of tokens", "unit of tokens", "turn of tokens", "text"),
        slack=1e-4,
    ),
}  # fmt: skip
