# SPDX-License-Identifier: Apache-2.0
"""Suppression: what stays when each token that stays removes those near it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.pairs import Relation

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256  # tokens whose fate is settled together


def non_maximum_suppression(near: Relation, score: Tensor, mask: Tensor) -> Tensor:
    """bool `[S, N]`: go through the tokens by falling score; one that is still there stays, and removes all after it
    that it is near.

    near: of bool, N by N, whether the first removes the second; score: float `[S, N]`, of equal ones the lower index
    comes first, NaN comes last; mask: bool `[S, N]`, False at padding. On a GPU, where there is a table, it takes N
    steps and asks the device nothing; else rows are made for those alone that come to stay, or nearly.
    """
    score = score.float().nan_to_num(nan=-torch.inf)
    order = torch.where(mask, score, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    there, rows = mask.clone(), torch.arange(len(mask), device=mask.device)
    if mask.device.type == "cpu" or not near.fits_in_memory:
        for segment, one in enumerate(there):
            _settle(near, segment, order[segment], rank[segment], one)
        return there
    for step in range(order.shape[1]):
        one = order[:, step]
        there &= ~(near.table[rows, one] & there[rows, one].unsqueeze(1) & (rank > step))
    return there


def _settle(near: Relation, segment: int, order: Tensor, rank: Tensor, there: Tensor) -> None:
    """Remove from `there`, bool `[N]`, what does not stay. order, rank: long `[N]`. Waits for the device."""
    for start in range(0, len(order), _BLOCK):
        some = order[start : start + _BLOCK]
        some = some[there[some]]
        if not len(some):
            continue
        removes = near.rows(segment, some)
        among, stays = removes[:, some].triu(1), torch.ones_like(some, dtype=torch.bool)
        while True:
            # Right for the first token of the block, then for all whose removers it is right for.
            new = ~(among & stays.unsqueeze(1)).any(0)
            if torch.equal(new, stays):
                break
            stays = new
        there[some] = stays
        there &= ~(removes[stays].any(0) & (rank >= start + _BLOCK))
