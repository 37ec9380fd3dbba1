# SPDX-License-Identifier: Apache-2.0
"""Weights that sum to 1: uniform weights and optimal transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def uniform_weights(mask: Tensor) -> Tensor:
    """Return float32 weights that are equal where `mask` is True, 0 elsewhere, and sum to 1 along the last axis."""
    # Dividing integer tensors would return the process's default dtype.
    return mask.float() / mask.sum(-1, keepdim=True).clamp(min=1)


def optimal_transport(cost: Tensor, rows: Tensor, columns: Tensor, blur: float = 0.01, steps: int = 200) -> Tensor:
    """Compute an entropic optimal transport plan with Sinkhorn's algorithm, in log space.

    Each step fits the columns and then the rows: row sums are exact, and column sums are approximate. No device
    synchronization.

    Args:
        cost: `[R, n, m]`, finite.
        rows: Logarithms of the row masses, `[R, n]`. Masses sum to 1; -inf is a mass of 0.
        columns: Logarithms of the column masses, `[R, m]`. Masses sum to 1; -inf is a mass of 0.
        blur: Strength of the entropic regularization.
        steps: Number of Sinkhorn iterations.

    Returns:
        Transported mass, float32 `[R, n, m]`.
    """
    scaled = -cost.float() / blur
    left = torch.zeros_like(rows).masked_fill(rows == -torch.inf, -torch.inf)
    for _ in range(steps):
        right = columns - (scaled + left.unsqueeze(2)).logsumexp(1)
        left = rows - (scaled + right.unsqueeze(1)).logsumexp(2)
    return (scaled + left.unsqueeze(2) + right.unsqueeze(1)).exp()
