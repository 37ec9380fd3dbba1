# SPDX-License-Identifier: Apache-2.0
"""Optimal transport between two sets of masses (Sinkhorn's algorithm)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def transport(cost: Tensor, rows: Tensor, columns: Tensor, blur: float = 0.01, steps: int = 200) -> Tensor:
    """float32 `[R, n, m]`: how much mass goes from each of n places to each of m at the least cost, with an entropic
    `blur`: its sums over columns and rows come near the masses, the latter are exact.

    cost: `[R, n, m]`, finite. rows, columns: `[R, n]` and `[R, m]`, the logarithms of masses that sum to 1; -inf is
    none, but not all are. In logarithms throughout, `steps` times. Nothing here asks the device.
    """
    scaled = -cost.float() / blur
    left, right = torch.zeros_like(rows), torch.zeros_like(columns)
    for _ in range(steps):
        left = rows - (scaled + right.unsqueeze(1)).logsumexp(2)
        right = columns - (scaled + left.unsqueeze(2)).logsumexp(1)
    return (scaled + left.unsqueeze(2) + right.unsqueeze(1)).exp()
