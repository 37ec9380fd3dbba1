# SPDX-License-Identifier: Apache-2.0
"""Weighted means of tokens that become one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor


@operation(kernel="tokenprune.kernels.join_triton:join")
def join(x: Tensor, keep: Tensor | None, own: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Let tokens join others: `[n, D]` -> `[m, D]`, each the weighted mean, in float32, of one that stays and of those
    that join it. What nothing joins, or nothing that weighs anything, is copied.

    keep: long `[m]`, the tokens that stay, in the order of the output; None if all do. own: float `[m]`, their weights.
    source: long `[r]`, tokens that join. target: long `[r]`, the places in the output where; m for nowhere. weight:
    float `[r]`. Members are added in their order, so that a mean is the same in every run.
    """
    count, wide = len(own), torch.promote_types(x.dtype, torch.float32)
    keep = torch.arange(count, device=x.device) if keep is None else keep
    # One row more than asked for takes what goes nowhere: no boolean indexing, so no device sync.
    out = x.index_select(0, torch.cat([keep, keep.new_zeros(1)]))
    order = target.argsort(stable=True)
    source, target, weight = source[order], target[order], weight[order].to(wide)
    # Only the rows that something joins are worked on: `slot` numbers them, `row` says which they are.
    slot = torch.cat([target.new_zeros(1), target.diff().ne(0).cumsum(0)])[: len(target)]
    row = torch.full_like(target, count).scatter(0, slot, target)
    start = torch.cat([own.to(wide), own.new_zeros(1, dtype=wide)])[row]
    total = start.index_add(0, slot, weight)
    mass = (out[row] * start[:, None]).index_add(0, slot, x.index_select(0, source) * weight[:, None])
    mean = (mass / total.masked_fill(total <= 0, 1)[:, None]).to(x.dtype)
    return out.index_copy_(0, torch.where(total > 0, row, count), mean)[:count]


@operation(kernel="tokenprune.kernels.join_triton:destinations")
def destinations(
    assign: Tensor, mask: Tensor, places: Tensor, weight: Tensor | None, nowhere: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `join` asks for where tokens are assigned to others.

    assign: long `[S, N]`, the token of its row that each becomes part of, itself if it stays, -1 for none. mask: bool
    `[S, N]`, False at padding. places: long `[S, N]`, where they all stand. weight: float `[S, N]`; None: all weigh 1.
    nowhere: how many places there are.

    Returns float32 `[nowhere]`, the weights of those that stay, 0 at other places; long `[S * N]`, the place that each
    token joins, `nowhere` for none; and their weights, float32 `[S * N]`.
    """
    weight = torch.ones_like(places, dtype=torch.float32) if weight is None else weight.float()
    absorbed = mask & (assign >= 0)
    itself = absorbed & (assign == torch.arange(places.shape[1], device=places.device))
    own = weight.new_zeros(nowhere + 1).scatter(0, torch.where(itself, places, nowhere).flatten(), weight.flatten())
    into = places.gather(1, assign.clamp(min=0))
    target = torch.where(absorbed & ~itself, into, nowhere)
    return own[:-1], target.flatten(), weight.flatten()
