# SPDX-License-Identifier: Apache-2.0
"""Selection of the tokens with the highest scores, with a fixed order of ties."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor


@operation(kernel="tokenprune.kernels.take_triton:take_in_turn")
def take_in_turn(score: Tensor, mask: Tensor, count: Tensor, max_count: int) -> Tensor:
    """Let P pickers in turn select the highest scoring tokens that are not yet taken.

    Ties go to the lower index, and NaN is lowest. The kernel selects the same tokens.

    Args:
        score: Scores of each picker, float `[S, P, N]`, or `[S, N]` for a single picker.
        mask: Candidates, bool `[S, N]`.
        count: Number of tokens of each picker, long `[S, P]` or `[S]`, limited to the available tokens.
        max_count: At least the maximum of `count`.

    Returns:
        Selected tokens, bool `[S, N]`.
    """
    score = score.float()
    if score.device.type == "cpu":
        from tokenprune.kernels import host_loops

        return host_loops.take_in_turn(score, mask, count)
    if score.ndim == 2:
        score, count = score.unsqueeze(1), count.unsqueeze(1)
    score = score.nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
    # Sort negated scores: unavailable tokens are NaN, which sorts last, so that -inf is a valid score.
    least = score.neg()
    rank, left = torch.arange(score.shape[2], device=score.device), mask
    for turn in range(score.shape[1]):
        order = least[:, turn].masked_fill(~left, torch.nan).argsort(dim=1, stable=True)
        left = left & torch.empty_like(left).scatter_(1, order, rank >= count[:, turn, None])
    return mask ^ left


def top_mask(score: Tensor, mask: Tensor, count: Tensor, max_count: int) -> Tensor:
    """Select the tokens with the highest scores in each row. Ties go to the lower index, and NaN is lowest.

    Args:
        score: float `[S, N]`.
        mask: Candidates, bool `[S, N]`.
        count: Number of tokens to select, long `[S]`.
        max_count: At least the maximum of `count`.

    Returns:
        Selected tokens, bool `[S, N]`.

    Examples:
        >>> score, mask = torch.tensor([[0.1, 0.9, 0.9]]), torch.ones(1, 3).bool()
        >>> top_mask(score, mask, torch.tensor([1]), 1).tolist()
        [[False, True, False]]
    """
    return take_in_turn(score, mask, count, max_count)


def adjust_count(keep: Tensor, score: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Drop the worst kept tokens, or add the best dropped tokens, until each row keeps `count` tokens.

    Args:
        keep: Kept tokens, bool `[S, N]`. Padding is ignored.
        score: float `[S, N]`. Ties go to the lower index, and NaN is lowest.
        mask: Valid tokens, bool `[S, N]`.
        count: Number of tokens to keep, long `[S]`, limited to the valid tokens.

    Returns:
        Kept tokens, bool `[S, N]`.
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
        return f"at most two keys are supported, not {len(keys)}"
    return None if group.shape[1] <= 2**14 else f"a row has {group.shape[1]} tokens, more than {2**14}"


@operation(kernel="tokenprune.kernels.rank_triton:rank_in_group", limits=_rank_limits)
def rank_in_group(group: Tensor, *keys: Tensor) -> Tensor:
    """Return the rank of each token in its group, largest key first, long `[S, N]`.

    Later keys break ties of earlier keys, and the index breaks the remaining ties. NaN is largest. The kernel returns
    the same ranks.

    Args:
        group: Group of each token, integer `[S, N]`.
        keys: Sort keys of any dtype, `[S, N]`.

    Examples:
        >>> rank_in_group(torch.tensor([[0, 0, 1]]), torch.tensor([[0.1, 0.2, 0.3]])).tolist()
        [[1, 0, 0]]
    """
    if group.device.type == "cpu":
        from tokenprune.kernels import host_loops

        return host_loops.rank_in_group(group, *keys)
    order = torch.arange(group.shape[1], device=group.device).expand_as(group)
    for key in reversed(keys):
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    order = order.gather(1, group.gather(1, order).argsort(dim=1, stable=True))
    groups = group.gather(1, order)
    rank_in_row = torch.arange(group.shape[1], device=group.device) - torch.searchsorted(groups, groups)
    return torch.empty_like(order).scatter_(1, order, rank_in_row)
