# SPDX-License-Identifier: Apache-2.0
"""Naive loop of OTPrune (arXiv 2602.20205)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import next_pick
from method_rows import Picks


def kernel_of(x: Tensor, gamma: float = 0.01) -> Tensor:
    v = x / x.norm(dim=0).clamp(min=1e-12)
    gram = v @ v.T
    return torch.eye(len(x), dtype=torch.float64) + gamma * gram @ gram.T


def naive(x: Tensor, keep: int, kept: Any = (), slack: float = 0.0, gamma: float = 0.01, **_: Any) -> list[int]:
    """Greedy MAP of the DPP with the kernel I + gamma G G^T.

    Gains exclude the identity, so that `slack` is relative to the differences between tokens.
    """
    kernel, picks, rows = kernel_of(x, gamma), [], []
    residual = kernel.diagonal().clone()
    for _ in range(keep):
        j = next_pick(residual - 1, picks, kept, slack)
        explained = torch.stack([row[j] * row for row in rows]).sum(0) if rows else 0
        rows.append((kernel[j] - explained) / residual[j].sqrt())
        residual = residual - rows[-1] ** 2
        picks.append(j)
    return picks


ROWS = {
    "otprune": Picks(
        naive=naive,
        tried=({}, {"gamma": 10.0}),
        refused=({"gamma": 0}, {"gamma": -1}, {"gamma": "1"}, {"gamma": math.nan}),
        unchanged=("unit of channels", "unit of tokens", "text"),
        slack=1e-3,
    )
}
