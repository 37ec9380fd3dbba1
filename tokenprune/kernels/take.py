# SPDX-License-Identifier: Apache-2.0
"""The tokens with the highest scores, in a fixed order among equals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor


@operation(kernel="tokenprune.kernels.take_triton:take_in_turn")
def take_in_turn(score: Tensor, mask: Tensor, count: Tensor, most: int) -> Tensor:
    """Let P pickers, one after the other, each take the tokens that score highest with it and are not taken yet;
    returns bool `[S, N]`, which were taken.

    score: float `[S, P, N]`; mask: bool `[S, N]`, what can be taken; count: long `[S, P]`, how many each takes, as far
    as there are; most: at least the largest count. Ties go to the lower index; NaN counts as lowest.
    """
    # Lowest first: what cannot be taken is NaN, which comes last, and -inf stays a legal score.
    least = score.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf).neg()
    rank, left = torch.arange(score.shape[2], device=score.device), mask
    for turn in range(score.shape[1]):
        order = least[:, turn].masked_fill(~left, torch.nan).argsort(dim=1, stable=True)
        left = left & torch.empty_like(left).scatter_(1, order, rank >= count[:, turn, None])
    return mask ^ left


def top_mask(score: Tensor, mask: Tensor, count: Tensor, most: int) -> Tensor:
    """bool `[S, N]`: the `count` (long `[S]`, at most `most`) highest scores of each row among `mask`; ties go to the
    lower index, NaN counts as lowest."""
    return take_in_turn(score[:, None], mask, count[:, None], most)


def adjust_count(keep: Tensor, score: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """bool `[S, N]`: `keep` with exactly `count` (long `[S]`) tokens a row: the worst of the kept are dropped, or the
    best of the dropped are added.

    keep: bool `[S, N]`, of which padding is ignored; score: float `[S, N]`, higher is better, NaN is worst, of equal
    ones the lower index is better; mask: bool `[S, N]`, False at padding. A row keeps at most all it has.
    """
    score = score.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
    order = score.argsort(dim=1, descending=True, stable=True)
    kind = torch.where(mask, keep.to(torch.uint8) + 1, 0)
    order = order.gather(1, kind.gather(1, order).argsort(dim=1, descending=True, stable=True))
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return mask & (rank < count[:, None])


def _rank_limits(group: Tensor, *keys: Tensor) -> str | None:
    if len(keys) > 2:
        return f"it compares two keys at most, not {len(keys)}"
    return None if group.shape[1] <= 2**14 else f"it compares {2**14} tokens at most, not {group.shape[1]}"


@operation(kernel="tokenprune.kernels.rank_triton:rank_in_group", limits=_rank_limits)
def rank_in_group(group: Tensor, *keys: Tensor) -> Tensor:
    """Return the place of each token in its group, largest first, long `[S, N]`; a later key, then the order, breaks
    ties.

    group: `[S, N]`, of a whole number's type; keys: `[S, N]`, of any type. NaN counts as largest.
    """
    order = torch.arange(group.shape[1], device=group.device).expand_as(group)
    for key in reversed(keys):
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    groups = group.gather(1, order)
    place = torch.arange(group.shape[1], device=group.device) - torch.searchsorted(groups, groups)
    return torch.empty_like(order).scatter_(1, order, place)
