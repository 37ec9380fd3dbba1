# SPDX-License-Identifier: Apache-2.0
"""Naive loops of CDPruner (arXiv 2506.10967) and DivPrune (2503.02175), also with Cen-Prune's centering."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table, next_pick, unit
from method_rows import Picks


def naive_centred(x: Tensor, z: Tensor, center: Any) -> tuple[Tensor, Tensor]:
    """Return the cosines of the centered features, and the normalized negative mean cosine of each token."""
    x = z if center == "tower" else x
    if center in ("tower", "standardised"):
        x = x / (x.var(0, unbiased=False) + 1e-6).sqrt()
    similarity, count = cosine_table(x), len(x)
    rows = [[float(similarity[i, j]) for j in range(count) if j != i] for i in range(count)]
    distinctness = torch.tensor([-sum(row) / max(1, count - 1) for row in rows])
    if center is True:
        distinctness = (distinctness - distinctness.min()) / (distinctness.max() - distinctness.min())
    else:
        distinctness = 1 / (
            1 + torch.exp(-(distinctness - distinctness.mean()) / (distinctness.std(unbiased=False) + 1e-6))
        )
    return cosine_table(x - x.mean(0)), distinctness.double()


def naive_relevance(x: Tensor, t: Tensor, sign: int, theta: float) -> Tensor:
    """Return the mean cosine to the text tokens, scaled to 0..1 and sharpened by `theta`."""
    relevance = torch.stack([sign * sum(unit(token) @ unit(word) for word in t) / len(t) for token in x])
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    return relevance if theta == 1 else torch.exp(theta / (2 * (1 - theta)) * relevance)


def naive(x: Tensor, z: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, sign: int = 1,
          theta: float = 0.5, center: Any = False, a: Any = None) -> list[int]:  # fmt: skip
    """Greedy MAP of the DPP with the kernel diag(r) S diag(r), by explicit Cholesky rows."""
    similarity, relevance = cosine_table(x), naive_relevance(x, t, sign, theta)
    if center:
        similarity, distinctness = naive_centred(x, z, center)
        relevance = relevance * distinctness
    kernel = relevance[:, None] * similarity * relevance
    residual, rows, picks = kernel.diagonal().clone(), [], []
    for _ in range(keep):
        j = next_pick(
            torch.where(residual > 1e-5 * kernel.diagonal(), residual, -1 / (1e-30 + relevance)), picks, kept, slack
        )
        if residual[j] > 1e-5 * kernel[j, j]:
            explained = torch.stack([row[j] * row for row in rows]).sum(0) if rows else 0
            rows.append((kernel[j] - explained) / residual[j].sqrt())
            residual = residual - rows[-1] ** 2
        picks.append(j)
    return picks


def naive_divprune(
    x: Tensor, z: Tensor, keep: int, center: Any = False, kept: Any = (), slack: float = 0.0, **_: Any
) -> list[int]:
    """Greedy max-min distance. The first token has the greatest distance to its nearest token."""
    similarity, distinctness = naive_centred(x, z, center) if center else (cosine_table(x), 1)
    distance = 1 - similarity
    distance_to_others = distance.clone().fill_diagonal_(torch.inf)
    picks = [next_pick(distance_to_others.amin(0), [], kept, slack)]
    while len(picks) < keep:
        picks.append(next_pick(distinctness * distance[picks].amin(0), picks, kept, slack))
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
