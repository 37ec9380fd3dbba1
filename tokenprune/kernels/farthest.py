# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the tokens that are farthest from each other (DivPrune)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.farthest_blocks import select_farthest_blocked
from tokenprune.kernels.match import best_match

if TYPE_CHECKING:
    from torch import Tensor

TABLE = 4096  # maximum tokens of a similarity table (or the number of features, if larger)


def fits_table(features: Tensor) -> bool:
    """Return True if the similarity table `[S, N, N]` is small enough to be kept in memory."""
    return features.shape[1] <= max(features.shape[2], TABLE)


def _compute_similarity_table(unit: Tensor) -> Tensor:
    """Return the products of all pairs, float32 `[S, N, N]`. The lower triangle is copied from the upper one."""
    count, block = unit.shape[1], max(256, -(-unit.shape[1] // 8))
    table = unit.new_empty(len(unit), count, count)
    for start in range(0, count, block):
        end = min(start + block, count)
        torch.matmul(unit[:, start:end], unit[:, start:].transpose(1, 2), out=table[:, start:end, start:])
        table[:, end:, start:end] = table[:, start:end, end:].transpose(1, 2)
    return table


def distance_to_nearest(
    features: Tensor, mask: Tensor, match: Callable[..., tuple[Tensor, Tensor]] = best_match
) -> Tensor:
    """Return the cosine distance of each token to its nearest other token, float32 `[S, N]`.

    The distance is +inf for the only token of a segment, and NaN for all tokens of a segment with a non-finite token.
    The distance matrix is never in memory.
    """
    nearest = 1 - match(features, features, mask, exclude_self=True)[0]
    broken = (~torch.isfinite(features).all(dim=2) & mask).any(dim=1, keepdim=True)
    return nearest.masked_fill(broken & nearest.isfinite(), torch.nan)


def _limits(features: Tensor, mask: Tensor, budget: Tensor, max_budget: int) -> str | None:
    if features.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"features are {features.dtype}, but must be float32, float16 or bfloat16"
    return None


@operation(kernel="tokenprune.kernels.farthest_triton:farthest", limits=_limits)
def farthest(features: Tensor, mask: Tensor, budget: Tensor, max_budget: int) -> Tensor:
    """Select tokens that are far from each other by cosine distance in float32 (max-min greedy).

    The first pick is the token with the largest distance to its nearest other token. Each next pick has the largest
    distance to the selected tokens. Ties go to the lower index, and NaN counts as farthest. The kernel agrees up to
    ties within float32 rounding.

    Args:
        features: `[S, N, D]`.
        mask: Valid tokens, bool `[S, N]`.
        budget: Number of tokens to select, long `[S]`, at most the number of valid tokens.
        max_budget: Maximum of `budget`.

    Returns:
        Selected tokens, bool `[S, N]`.

    Examples:
        >>> x = torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]])
        >>> farthest(x, torch.ones(1, 3).bool(), torch.tensor([2]), 2).tolist()
        [[True, False, True]]
    """
    unit = torch.nn.functional.normalize(features.float(), dim=-1)
    if not fits_table(unit):
        taken = torch.zeros_like(mask)
        for row, num_picks in enumerate(budget.tolist()):
            valid = mask[row].nonzero().flatten()
            taken[row, valid] = select_farthest_blocked(unit[row, valid], num_picks)
        return taken
    if len(unit) == 1 and unit.device.type == "cpu" and unit[mask].isfinite().all():
        from tokenprune.kernels.host_loops import pick_farthest

        table = _compute_similarity_table(unit[:, mask[0]])[0].fill_diagonal_(-torch.inf)
        return torch.zeros_like(mask).masked_scatter_(mask, pick_farthest(table, int(budget)))
    rows = torch.arange(len(unit), device=unit.device)
    table = _compute_similarity_table(unit)
    table.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    table.masked_fill_(~mask[:, None], -torch.inf)
    nearest = 1 - table.amax(dim=2)
    barred = ~mask
    for step in range(max_budget):
        # -inf excludes selected tokens and padding, also if distances are NaN.
        pick = nearest.masked_fill(barred, -torch.inf).argmax(dim=1)
        barred[rows, pick] = barred[rows, pick] | (step < budget)
        new = 1 - table[rows, pick]
        nearest = new if step == 0 else torch.minimum(nearest, new)
    return barred & mask
