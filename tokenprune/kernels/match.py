# SPDX-License-Identifier: Apache-2.0
"""Cosine similarities, and the most similar token without the full similarity matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.dispatch import operation, uses_kernels
from tokenprune.kernels.host_checks import is_all_finite, is_all_true, reads_fast

if TYPE_CHECKING:
    from torch import Tensor

_MAX_ELEMENTS = 2**22  # similarities in memory at a time
_BLOCK = 64  # similarities per block of `_find_row_maxima`
# Cosines of equal vectors differ by up to 2e-7, depending on the position in a matrix and the processor. Closer cosines
# count as ties, so that the lower index wins on every machine.
TIE = 2.0**-20


def _limits(a: Tensor, b: Tensor, *args: object, **kwargs: object) -> str | None:
    fine = a.dtype == b.dtype and a.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return None if fine else f"inputs are {a.dtype} and {b.dtype}, but both must be float32, float16 or bfloat16"


@operation(kernel="tokenprune.kernels.match_triton:cosines", limits=_limits)
def cosines(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosines of all tokens of `a` with all tokens of `b` in float32, for few tokens in `a` or `b`.

    A zero vector has cosine 0 with all others, and a non-finite vector NaN. The kernel agrees within float32 rounding.

    Args:
        a: `[S, A, D]`.
        b: `[S, B, D]`.

    Returns:
        float32 `[S, A, B]`.
    """
    normalize = torch.nn.functional.normalize
    return torch.bmm(normalize(a.float(), dim=-1), normalize(b.float(), dim=-1).transpose(1, 2))


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
    """Find the token of `b` with the largest cosine to each token of `a`, in float32.

    Cosines within `TIE` of the largest are ties, which go to the lower index. A non-finite vector is less similar (-2)
    than any other. The kernel returns the same indices up to near-ties at a `TIE` boundary.

    Args:
        a: `[S, A, D]`.
        b: `[S, B, D]`.
        allowed: Tokens of `b` that can match, bool `[S, B]`. None allows all.
        group_a: Group of each token of `a`, long `[S, A]`. With both groups, tokens match within their group, unless it
            has no allowed token.
        group_b: Group of each token of `b`, long `[S, B]`.
        exclude_self: `a` and `b` are the same tokens, and no token matches itself.

    Returns:
        Cosine of the match, float32 `[S, A]`, -inf without a match; and its index in `b`, long `[S, A]`, 0 without a
        match.

    Examples:
        >>> a, b = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
        >>> cosine, index = best_match(a, b)
        >>> cosine.item(), index.item()
        (1.0, 1)
    """
    unit = torch.nn.functional.normalize(a.float(), dim=-1)
    others = unit if b is a else torch.nn.functional.normalize(b.float(), dim=-1)
    is_finite = is_all_finite(unit) and (b is a or is_all_finite(others))
    groups = None if group_a is None or group_b is None else (group_a, group_b)
    best, index = _find_match(unit, others, allowed, groups, exclude_self, is_finite)
    # A row sum does not depend on its position, unlike an entry of a matrix product, so equal pairs have equal cosines.
    cosine = (unit * gather_tokens(others, index, 1)).sum(2)
    return torch.where(best > -1.5, cosine, best), index


def match_selected(x: Tensor, selected: Tensor, max_selected: int, group: Tensor | None = None) -> Tensor:
    """Find the selected token with the largest cosine to each token. See `best_match`.

    Args:
        x: Tokens, `[S, N, D]`.
        selected: Tokens that can match, bool `[S, N]`.
        max_selected: At least the largest number of selected tokens in a segment.
        group: Group of each token, long `[S, N]`. Tokens match within their group, unless it has no selected token.

    Returns:
        Index of the match, long `[S, N]`. Ties go to the lower index.

    Examples:
        >>> x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]])
        >>> match_selected(x, torch.tensor([[True, True, False]]), 2).tolist()
        [[0, 1, 0]]
    """
    if reads_fast(selected):  # the exact number avoids masking unused columns
        max_selected = int(selected.numpy().sum(axis=1).max(initial=1))
    indices = partition(selected)[:, :max_selected]
    allowed = selected.gather(1, indices)
    groups = None if group is None else (group, group.gather(1, indices))
    if reads_fast(x) and not uses_kernels(x.device):
        unit = torch.nn.functional.normalize(x.float(), dim=-1)
        chosen = gather_tokens(unit, indices, 1)
        match = _find_match(unit, chosen, allowed, groups, False, is_all_finite(unit))[1]
    else:
        group_a, group_b = groups or (None, None)
        match = best_match(x, gather_tokens(x, indices, 1), allowed, group_a=group_a, group_b=group_b)[1]
    return indices.gather(1, match)


def _find_match(
    unit: Tensor,
    others: Tensor,
    allowed: Tensor | None,
    groups: tuple[Tensor, Tensor] | None,
    exclude_self: bool,
    is_finite: bool,
) -> tuple[Tensor, Tensor]:
    """Return the largest cosine, -inf without a match, and its index, for vectors of length 1. See `best_match`."""
    units = others.transpose(1, 2)
    allowed = None if allowed is None or is_all_true(allowed) else allowed
    groups = None if groups is None or _is_single_group(*groups) else groups
    step = max(1, _MAX_ELEMENTS // max(1, units.shape[0] * units.shape[2]))
    results = []
    for start in range(0, unit.shape[1], step):
        rows = slice(start, start + step)
        likeness = torch.bmm(unit if step >= unit.shape[1] else unit[:, rows], units)
        if not is_finite:
            likeness.nan_to_num_(nan=-2.0)
        if exclude_self:
            likeness.diagonal(start, 1, 2).fill_(-torch.inf)
        if allowed is not None:
            likeness.masked_fill_(~allowed[:, None], -torch.inf)
        best, index = _find_row_maxima(likeness)
        if groups is not None:
            likeness.masked_fill_(groups[0][:, rows, None] != groups[1][:, None], -torch.inf)
            group_best, where = _find_row_maxima(likeness)
            best, index = (
                torch.where(group_best > -torch.inf, group_best, best),
                torch.where(group_best > -torch.inf, where, index),
            )
        results.append((best, index))
    if len(results) == 1:
        return results[0]
    best, index = (torch.cat(part, dim=1) for part in zip(*results, strict=True))
    return best, index


def _find_row_maxima(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row of x `[S, A, B]`, and the first index within `TIE` of it, long `[S, A]`.

    Long rows are searched in blocks, because finding a maximum is several times faster than finding its index.
    """
    num_blocks = x.shape[2] // _BLOCK
    if num_blocks < 8:
        if x.device.type == "cpu":
            from tokenprune.kernels.host_loops import find_first_max

            return find_first_max(x, TIE)
        best = x.amax(dim=2)
        return best, _find_first_tie(x, best)
    blocks, rest = x[..., : num_blocks * _BLOCK].unflatten(2, (num_blocks, _BLOCK)), x[..., num_blocks * _BLOCK :]
    of_blocks = blocks.amax(dim=3)
    if rest.shape[2]:
        of_blocks = torch.cat([of_blocks, rest.amax(dim=2, keepdim=True)], dim=2)
    best = of_blocks.amax(dim=2)
    block = _find_first_tie(of_blocks, best)
    inside = blocks.gather(2, block.clamp(max=num_blocks - 1)[..., None, None].expand(-1, -1, 1, _BLOCK)).squeeze(2)
    index = block * _BLOCK + _find_first_tie(inside, best)
    if rest.shape[2]:
        index = torch.where(block == num_blocks, num_blocks * _BLOCK + _find_first_tie(rest, best), index)
    return best, index


def _find_first_tie(x: Tensor, best: Tensor) -> Tensor:
    """Return the first index in each row of x `[S, A, B]` that is within `TIE` of `best` `[S, A]`."""
    return (x >= (best - TIE)[..., None]).to(torch.uint8).argmax(dim=2)


def _is_single_group(group_a: Tensor, group_b: Tensor) -> bool:
    """Return True if the host reads the groups fast and all tokens of each row belong to one group."""
    if not reads_fast(group_a):
        return False
    groups, others = group_a.numpy(), group_b.numpy()
    return bool((groups == groups[:, :1]).all() and (others == groups[:, :1]).all())
