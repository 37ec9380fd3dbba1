# SPDX-License-Identifier: Apache-2.0
"""Non-maximum suppression of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.pairs import Relation

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 256  # tokens decided together


def non_maximum_suppression(suppresses: Relation, score: Tensor, mask: Tensor) -> Tensor:
    """Keep tokens in the order of falling score, each of which removes the later tokens that it suppresses.

    On a GPU with a table, this takes N steps without synchronization. Otherwise, only rows of kept tokens (and few
    others) are computed.

    Args:
        suppresses: bool relation, N by N: whether the first token suppresses the second.
        score: float `[S, N]`. Ties go to the lower index, and NaN comes last.
        mask: Valid tokens, bool `[S, N]`.

    Returns:
        Kept tokens, bool `[S, N]`.
    """
    score = score.float().nan_to_num(nan=-torch.inf)
    order = torch.where(mask, score, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    kept, rows = mask.clone(), torch.arange(len(mask), device=mask.device)
    if mask.device.type == "cpu" or not suppresses.fits_in_memory:
        for segment, indices in enumerate(kept):
            _settle(suppresses, segment, order[segment], rank[segment], indices)
        return kept
    for step in range(order.shape[1]):
        indices = order[:, step]
        kept &= ~(suppresses.table[rows, indices] & kept[rows, indices].unsqueeze(1) & (rank > step))
    return kept


def _settle(suppresses: Relation, segment: int, order: Tensor, rank: Tensor, is_kept: Tensor) -> None:
    """Remove suppressed tokens of one segment from `is_kept`, bool `[N]`, in place. Synchronizes with the device."""
    for start in range(0, len(order), _BLOCK):
        block = order[start : start + _BLOCK]
        block = block[is_kept[block]]
        if not len(block):
            continue
        removes = suppresses.rows(segment, block)
        among, stays = removes[:, block].triu(1), torch.ones_like(block, dtype=torch.bool)
        while True:
            # Iterate to a fixed point: each pass is correct for at least one more token.
            new = ~(among & stays.unsqueeze(1)).any(0)
            if torch.equal(new, stays):
                break
            stays = new
        is_kept[block] = stays
        is_kept &= ~(removes[stays].any(0) & (rank >= start + _BLOCK))
