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

TABLE = 4096  # tokens whose similarities are kept, all of them; also as many as a token has features


def fits_table(features: Tensor) -> bool:
    """Return True if all similarities `[S, N, N]` are to be held in memory, which is then about that of the
    features."""
    return features.shape[1] <= max(features.shape[2], TABLE)


def _alike(unit: Tensor) -> Tensor:
    """float32 `[S, N, N]`: products of all pairs. Each is made once: the half below the diagonal is a copy."""
    count, block = unit.shape[1], max(256, -(-unit.shape[1] // 8))
    table = unit.new_empty(len(unit), count, count)
    for start in range(0, count, block):
        end = min(start + block, count)
        torch.matmul(unit[:, start:end], unit[:, start:].transpose(1, 2), out=table[:, start:end, start:])
        table[:, end:, start:end] = table[:, start:end, end:].transpose(1, 2)
    return table


def _of_table(unit: Tensor, number: int) -> Tensor:
    """bool `[N]`: the picks among the tokens of one segment, float32 `[1, N, D]`, finite. Asks for each pick."""
    table = _alike(unit)[0].fill_diagonal_(-torch.inf)
    apart, taken = 1 - table.amax(dim=1), []
    for step in range(number):
        pick = int(apart.argmax())
        taken.append(pick)
        apart = 1 - table[pick] if step == 0 else torch.minimum(apart, 1 - table[pick], out=apart)
        apart[pick] = -torch.inf
    index = torch.tensor(taken, dtype=torch.long, device=apart.device)
    return torch.zeros_like(apart, dtype=torch.bool).index_fill_(0, index, True)


def distance_to_nearest(
    features: Tensor, mask: Tensor, match: Callable[..., tuple[Tensor, Tensor]] = best_match
) -> Tensor:
    """float32 `[S, N]`: cosine distance of each token to its nearest other token; +inf for one that has none, NaN for
    all of a segment with a token that is not finite. The matrix of distances is never in memory."""
    nearest = 1 - match(features, features, mask, exclude_self=True)[0]
    broken = (~torch.isfinite(features).all(dim=2) & mask).any(dim=1, keepdim=True)
    return nearest.masked_fill(broken & nearest.isfinite(), torch.nan)


def _limits(features: Tensor, mask: Tensor, budget: Tensor, most: int) -> str | None:
    if features.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it takes float32, float16 or bfloat16, not {features.dtype}"
    return None


@operation(kernel="tokenprune.kernels.farthest_triton:farthest", limits=_limits)
def farthest(features: Tensor, mask: Tensor, budget: Tensor, most: int) -> Tensor:
    """Take the token whose nearest other is farthest away, then again and again the one farthest from all taken, by
    cosine distance in float32; returns bool `[S, N]`, which were taken.

    features: `[S, N, D]`; mask: bool `[S, N]`, tokens that are no padding; budget: long `[S]`, how many to take, at
    most those of the mask; most: the largest budget. Ties go to the lower index; NaN counts as farthest.
    """
    unit = torch.nn.functional.normalize(features.float(), dim=-1)
    if not fits_table(unit):
        taken = torch.zeros_like(mask)
        for row, number in enumerate(budget.tolist()):
            real = mask[row].nonzero().flatten()
            taken[row, real] = select_farthest_blocked(unit[row, real], number)
        return taken
    if len(unit) == 1 and unit.device.type == "cpu" and unit[mask].isfinite().all():
        taken = torch.zeros_like(mask)
        taken[mask] = _of_table(unit[:, mask[0]], int(budget))
        return taken
    rows = torch.arange(len(unit), device=unit.device)
    table = _alike(unit)
    table.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    table.masked_fill_(~mask[:, None], -torch.inf)
    nearest = 1 - table.amax(dim=2)
    barred = ~mask
    for step in range(most):
        # -inf bars what is taken or padding, whatever the distances are.
        pick = nearest.masked_fill(barred, -torch.inf).argmax(dim=1)
        barred[rows, pick] = barred[rows, pick] | (step < budget)
        new = 1 - table[rows, pick]
        nearest = new if step == 0 else torch.minimum(nearest, new)
    return barred & mask
