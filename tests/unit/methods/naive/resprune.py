# SPDX-License-Identifier: Apache-2.0
"""Naive loop of ResPrune (arXiv 2603.21105), with explicit Gram-Schmidt steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greedy import next_pick, unit
from method_rows import Picks


def naive_relevance(x: Tensor, t: Tensor) -> Tensor:
    """Return the greatest cosine to a text token, scaled to 0..1 (eq. 13)."""
    relevance = torch.stack([max(unit(token) @ unit(word) for word in t) for token in x])
    return (relevance - relevance.min()) / (relevance.max() - relevance.min()) + 1e-3


def naive(x: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, alpha: float = 1.0,
          unit: bool = False, **_: Any) -> list[int]:  # fmt: skip
    """Pick the greatest residual energy ||v - P_S v||^2 times r^alpha, with one Gram-Schmidt step per pick."""
    x = x / x.norm(dim=1, keepdim=True) if unit else x
    weight = naive_relevance(x, t) ** alpha
    residual, picks, initial_energy = x.clone(), [], x.square().sum(1) * weight
    for _ in range(keep):
        energy = residual.square().sum(1) * weight
        j = next_pick(
            torch.where(energy > 1e-5 * initial_energy, energy, -1 / (1e-30 + initial_energy)), picks, kept, slack
        )
        picks.append(j)
        if energy[j] > 1e-5 * initial_energy[j]:
            direction = residual[j] / residual[j].norm()
            residual = residual - (residual @ direction)[:, None] * direction
    return picks


ROWS = {
    "resprune": Picks(
        naive=naive,
        tried=({}, {"alpha": 0.0}, {"unit": True}, {"alpha": 2.0}),
        refused=({"alpha": -1.0}, {"unit": 1}),
        unchanged=("unit of tokens", "order of text", "text twice"),
        slack=1e-3,
    ),
}
