# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `take.rank_in_group`. Each token counts the tokens of its group that come before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _before(theirs, mine, tied):
    """Return True where theirs is larger (NaN is largest), or equal with `tied` set."""
    larger = (theirs > mine) | ((theirs != theirs) & (mine == mine))
    equal = (theirs == mine) | ((theirs != theirs) & (mine != mine))
    return larger | (equal & tied)


@triton.jit
def _values(key, offset, N):
    """Load keys, and convert bfloat16 to float32, because not every GPU can compare bfloat16."""
    value = tl.load(key + offset, offset < N, 0)
    if key.dtype.element_ty == tl.bfloat16:
        return value.to(tl.float32)
    else:
        return value


@triton.jit(do_not_specialize=["N"])
def _rank(
    group, first, second, out, N, GROUPS: tl.constexpr, KEYS: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    group += s * N
    first += s * N
    second += s * N
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    mine = i
    if GROUPS:
        mine = tl.load(group + i, i < N, 0)
    mine_first = _values(first, i, N)
    mine_second = _values(second, i, N)
    rank = tl.zeros([BLOCK_I], tl.int32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        before = j[None, :] < i[:, None]
        if KEYS > 1:
            before = _before(_values(second, j, N)[None, :], mine_second[:, None], before)
        if KEYS > 0:
            before = _before(_values(first, j, N)[None, :], mine_first[:, None], before)
        before = before & (j < N)[None, :]
        if GROUPS:
            before = before & (tl.load(group + j, j < N, 0)[None, :] == mine[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    tl.store(out + s * N + i, rank.to(tl.int64), i < N)


def rank_in_group(group: Tensor, *keys: Tensor, block: int = 64) -> Tensor:
    """See `take.rank_in_group`. `block` is the number of tokens per tile side."""
    return _compute_ranks(_prepare_key(group), [_prepare_key(key) for key in keys], True, block)


def rank(score: Tensor, *, block: int = 64) -> Tensor:
    """Return the rank of each token in its row `[S, N]`, largest first, long. Ties go to the lower index."""
    score = _prepare_key(score)
    return _compute_ranks(score, [score], False, block)


def _compute_ranks(group: Tensor, keys: list[Tensor], groups: bool, block: int) -> Tensor:
    rows, count = group.shape
    out = torch.empty(group.shape, dtype=torch.int64, device=group.device)
    if out.numel():
        first, second = (*keys, group, group)[:2]
        _rank[triton.cdiv(count, block), rows](
            group, first, second, out, count, GROUPS=groups, KEYS=len(keys), BLOCK_I=block, BLOCK_J=block
        )
    return out


def _prepare_key(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) if x.dtype == torch.bool else x).contiguous()
