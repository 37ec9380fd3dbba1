# SPDX-License-Identifier: Apache-2.0
"""The similarities of tokens with others, and the most similar of many without the matrix of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 2**22  # similarities in memory at a time
_BLOCK = 64  # similarities of which the largest is found before its place
# Cosines of equal vectors differ by up to 2e-7, by where they stand in a matrix and by processor. What is this close to
# the best is as good: then the place decides, the same on every machine.
TIE = 2.0**-20


def _limits(a: Tensor, b: Tensor, *args: object, **kwargs: object) -> str | None:
    fine = a.dtype == b.dtype and a.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return None if fine else f"it takes two of float32, float16 or bfloat16, not {a.dtype} and {b.dtype}"


@operation(kernel="tokenprune.kernels.match_triton:cosines", limits=_limits)
def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosines of all tokens of `a` with all of `b`, float32 `[S, A, B]`, for a few of one of them.

    a: `[S, A, D]`; b: `[S, B, D]`. A vector of zeros has 0 with all; one that is not finite has NaN.
    """
    normalize = torch.nn.functional.normalize
    return normalize(a.float(), dim=-1) @ normalize(b.float(), dim=-1).transpose(1, 2)


@operation(kernel="tokenprune.kernels.match_triton:best_match", limits=_limits)
def best_match(
    a: Tensor,
    b: Tensor,
    allowed: Tensor | None = None,
    *,
    group_a: Tensor | None = None,
    group_b: Tensor | None = None,
    exclude_self: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find for each token of `a` the token of `b` that is most similar by cosine, in float32.

    a: `[S, A, D]`; b: `[S, B, D]`. allowed: bool `[S, B]` or None (all), which of `b` can be found. group_a, group_b:
    long `[S, A]`, `[S, B]` or None: only one of its own group can be found, unless that group has no allowed one.
    others: a and b are the same tokens, and none finds itself. Returns float `[S, A]`, the cosine, -inf where there is
    nothing to find, and long `[S, A]`, its place in b (then 0). Ties, which are all within `TIE` of the best, go to the
    lower place; a vector that is not finite is less similar (-2) than any other.
    """
    unit = torch.nn.functional.normalize(a.float(), dim=-1)
    units = (unit if b is a else torch.nn.functional.normalize(b.float(), dim=-1)).transpose(1, 2)
    # On the host it costs little to ask what need not be looked for among all pairs.
    finite = one_group = False
    if a.device.type == "cpu":
        finite = bool((unit.sum() + units.sum()).isfinite())
        one_group = group_a is not None and group_b is not None and _are_one(group_a, group_b)
    step = max(1, _AT_ONCE // max(1, units.shape[0] * units.shape[2]))
    found = []
    for start in range(0, a.shape[1], step):
        rows = slice(start, start + step)
        likeness = unit[:, rows] @ units
        if not finite:
            likeness.nan_to_num_(nan=-2.0)
        if exclude_self:
            likeness.diagonal(start, 1, 2).fill_(-torch.inf)
        if allowed is not None:
            likeness.masked_fill_(~allowed[:, None], -torch.inf)
        best, place = _first_max(likeness)
        if group_a is not None and group_b is not None and not one_group:
            likeness.masked_fill_(group_a[:, rows, None] != group_b[:, None], -torch.inf)
            own, where = _first_max(likeness)
            best, place = torch.where(own > -torch.inf, own, best), torch.where(own > -torch.inf, where, place)
        found.append((best, place))
    best, place = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
    # A sum of one row does not depend on where it stands, as that of a matrix product does: equal pairs have one value.
    cosine = (unit * units.transpose(1, 2).gather(1, place[..., None].expand_as(unit))).sum(2)
    return torch.where(best > -1.5, cosine, best), place


def _first_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row, `[S, A]`, and the first place of one that ties with it, long `[S, A]`. x:
    `[S, A, B]`. Many are searched in blocks: finding a value is several times faster than finding where it stands."""
    whole = x.shape[2] // _BLOCK
    if whole < 8:
        best = x.amax(dim=2)
        return best, _first_tie(x, best)
    blocks, rest = x[..., : whole * _BLOCK].unflatten(2, (whole, _BLOCK)), x[..., whole * _BLOCK :]
    of_blocks = blocks.amax(dim=3)
    if rest.shape[2]:
        of_blocks = torch.cat([of_blocks, rest.amax(dim=2, keepdim=True)], dim=2)
    best = of_blocks.amax(dim=2)
    block = _first_tie(of_blocks, best)
    inside = blocks.gather(2, block.clamp(max=whole - 1)[..., None, None].expand(-1, -1, 1, _BLOCK)).squeeze(2)
    place = block * _BLOCK + _first_tie(inside, best)
    if rest.shape[2]:
        place = torch.where(block == whole, whole * _BLOCK + _first_tie(rest, best), place)
    return best, place


def _first_tie(x: Tensor, best: Tensor) -> Tensor:
    """Return the first place of each row of x, `[S, A, B]`, that is within `TIE` of `best`, `[S, A]`."""
    return (x >= (best - TIE)[..., None]).to(torch.uint8).argmax(dim=2)


def _are_one(group_a: Tensor, group_b: Tensor) -> bool:
    """Return True if all tokens of each row are of one group."""
    first = group_a[:, :1]
    return bool((group_a == first).all() and (group_b == first).all())
