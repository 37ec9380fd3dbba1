# SPDX-License-Identifier: Apache-2.0
"""The most similar of many tokens for each token, without the matrix of all their similarities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 2**22  # similarities in memory at a time
_BLOCK = 64  # similarities of which the largest is found before its place


def _limits(a: Tensor, b: Tensor, *args: object, **kwargs: object) -> str | None:
    fine = a.dtype == b.dtype and a.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return None if fine else f"it takes two of float32, float16 or bfloat16, not {a.dtype} and {b.dtype}"


@operation(kernel="tokenprune.kernels.match_triton:best_match", limits=_limits)
def best_match(
    a: Tensor,
    b: Tensor,
    allowed: Tensor | None = None,
    *,
    group_a: Tensor | None = None,
    group_b: Tensor | None = None,
    others: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find for each token of `a` the token of `b` that is most similar by cosine, in float32.

    a: `[S, A, D]`; b: `[S, B, D]`. allowed: bool `[S, B]` or None (all), which of `b` can be found. group_a, group_b:
    long `[S, A]`, `[S, B]` or None: only one of its own group can be found, unless that group has no allowed one.
    others: a and b are the same tokens, and none finds itself. Returns float `[S, A]`, the cosine, -inf where there is
    nothing to find, and long `[S, A]`, its place in b (then 0). Ties go to the lower place; a vector that is not finite
    is less similar (-2) than any other.
    """
    unit = torch.nn.functional.normalize(a.float(), dim=-1)
    units = (unit if b is a else torch.nn.functional.normalize(b.float(), dim=-1)).transpose(1, 2)
    # On the host it costs little to ask what need not be looked for among all pairs.
    finite = one_group = False
    if a.device.type == "cpu":
        finite = bool((unit.sum() + units.sum()).isfinite())
        one_group = group_a is not None and _are_one(group_a, group_b)
    step = max(1, _AT_ONCE // max(1, units.shape[0] * units.shape[2]))
    found = []
    for start in range(0, a.shape[1], step):
        rows = slice(start, start + step)
        likeness = unit[:, rows] @ units
        if not finite:
            likeness.nan_to_num_(nan=-2.0)
        if others:
            likeness.diagonal(start, 1, 2).fill_(-torch.inf)
        if allowed is not None:
            likeness.masked_fill_(~allowed[:, None], -torch.inf)
        best, place = _first_max(likeness)
        if group_a is not None and not one_group:
            likeness.masked_fill_(group_a[:, rows, None] != group_b[:, None], -torch.inf)
            own, where = _first_max(likeness)
            best, place = torch.where(own > -torch.inf, own, best), torch.where(own > -torch.inf, where, place)
        found.append((best, place))
    return torch.cat([best for best, _ in found], dim=1), torch.cat([place for _, place in found], dim=1)


def _first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row, `[S, A]`, and its place, long `[S, A]`, of equal ones the first. x: `[S, A, B]`.
    Many are searched in blocks: finding a value is several times faster than finding where it stands."""
    whole = x.shape[2] // _BLOCK
    if whole < 8:
        return x.max(dim=2)
    blocks = x[..., : whole * _BLOCK].unflatten(2, (whole, _BLOCK))
    best, block = blocks.amax(dim=3).max(dim=2)
    inside = blocks.gather(2, block[..., None, None].expand(-1, -1, 1, _BLOCK)).squeeze(2).max(dim=2).indices
    place = block * _BLOCK + inside
    if whole * _BLOCK < x.shape[2]:
        rest, where = x[..., whole * _BLOCK :].max(dim=2)
        place = torch.where(rest > best, where + whole * _BLOCK, place)
        best = torch.maximum(best, rest)
    return best, place


def _are_one(group_a: Tensor, group_b: Tensor) -> bool:
    """Whether all tokens of each row are of one group."""
    first = group_a[:, :1]
    return bool((group_a == first).all() and (group_b == first).all())
