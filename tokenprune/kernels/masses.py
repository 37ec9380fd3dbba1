# SPDX-License-Identifier: Apache-2.0
"""Masses that sum to 1: even ones, and optimal transport between two sets of them (Sinkhorn's algorithm)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def uniform_weights(mask: Tensor) -> Tensor:
    """Return float32 weights, alike where a bool mask is True and 0 elsewhere, that add up to 1 along its last axis."""
    # In float32: counts divided by counts take a process's default dtype.
    return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


def optimal_transport(cost: Tensor, rows: Tensor, columns: Tensor, blur: float = 0.01, steps: int = 200) -> Tensor:
    """float32 `[R, n, m]`: how much mass goes from each of n places to each of m at the least cost, with an entropic
    `blur`. Each of `steps` rounds fits the columns and then the rows, so that what leaves each row is exact, and what
    comes to each column is near its mass.

    cost: `[R, n, m]`, finite. rows, columns: `[R, n]` and `[R, m]`, the logarithms of masses that sum to 1; -inf is
    none, but not all are. In logarithms throughout. Nothing here asks the device.
    """
    scaled = -cost.float() / blur
    left = torch.zeros_like(rows).masked_fill(rows == -torch.inf, -torch.inf)
    for _ in range(steps):
        right = columns - (scaled + left.unsqueeze(2)).logsumexp(1)
        left = rows - (scaled + right.unsqueeze(1)).logsumexp(2)
    return (scaled + left.unsqueeze(2) + right.unsqueeze(1)).exp()
