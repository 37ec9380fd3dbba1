# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `pairing.py`. They rank tokens by counting larger similarities instead of sorting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.rank_triton import rank

_MATRIX = 2**14  # comparisons per iteration of a program
_ALONE = 512  # sources per row that one program ranks; longer rows are ranked by a separate launch


@triton.jit(do_not_specialize=["protected", "num_valid", "A"])
def _sources(best, partner, counts, value, index, protected, num_valid, A, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if not EVEN:
        num_valid = tl.load(counts + s).to(tl.int32)
    inside = offset < A
    can = inside & (2 * offset >= protected) & (2 * offset < num_valid)
    # Round to steps of `match.TIE`, the spacing of float32 between 8 and 16.
    similarity = (tl.load(best + s * A + offset, inside, 0.0) + 12.0) - 12.0
    tl.store(value + s * A + offset, tl.where(can, similarity, float("-inf")), inside)
    tl.store(index + s * A + offset, tl.where(can, tl.load(partner + s * A + offset, inside, 0), 0), inside)


def as_sources(best: Tensor, partner: Tensor, protected: int, num_valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `pairing.as_sources`."""
    best, partner = best.contiguous(), partner.contiguous()
    value, index = torch.empty_like(best), torch.empty_like(partner)
    rows, width = best.shape
    if best.numel():
        block = min(1024, triton.next_power_of_2(width))
        _sources[triton.cdiv(width, block), rows](
            best,
            partner,
            best if num_valid is None else num_valid,
            value,
            index,
            protected,
            2 * width,
            width,
            EVEN=num_valid is None,
            BLOCK=block,
        )
    return value, index


@triton.jit(do_not_specialize=["num_merged", "num_valid", "protected", "A", "M", "R"])
def _pair(
    best, partner, ranks, gone_of, real_of, keep, source, target, num_merged, num_valid, protected, A, M, R,
    EVEN: tl.constexpr, BY_INDEX: tl.constexpr, RANKED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    best += s * A
    keep += s * M
    source += s * R
    target += s * R
    if not EVEN:
        num_merged = tl.load(gone_of + s).to(tl.int32)
        num_valid = tl.load(real_of + s).to(tl.int32)
    offset = tl.arange(0, BLOCK)
    inside = offset < A
    rank = tl.zeros([BLOCK], tl.int32)
    if RANKED:
        rank = tl.load(ranks + s * A + offset, inside, 0).to(tl.int32)
    else:
        mine = tl.load(best + offset, inside, float("-inf"))
        for start in range(0, A, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = tl.load(best + other, other < A, float("-inf"))
            more, tied = theirs[None, :] > mine[:, None], theirs[None, :] == mine[:, None]
            before = (more | (tied & (other[None, :] < offset[:, None]))) & (other < A)[None, :]
            rank += tl.sum(before.to(tl.int32), 1)
    # Padding is 0, a valid index.
    for start in range(0, M, BLOCK):
        tl.store(
            keep + start + offset,
            tl.zeros([BLOCK], tl.int64),
            (start + offset >= num_valid - num_merged) & (start + offset < M),
        )
    for start in range(0, R, BLOCK):
        behind = (start + offset >= num_merged) & (start + offset < R)
        tl.store(source + start + offset, tl.zeros([BLOCK], tl.int64), behind)
        tl.store(target + start + offset, tl.zeros([BLOCK], tl.int64), behind)
    leaves = inside & (rank < num_merged)
    even, odd = 2 * offset, 2 * offset + 1
    stays = inside & (even >= protected) & (even < num_valid) & (rank >= num_merged)
    turn = tl.cumsum(stays.to(tl.int32), 0) - 1
    if not BY_INDEX:
        turn = rank - num_merged
    ahead = protected // 2
    of_odd = (
        protected + (num_valid + 1) // 2 - (protected + 1) // 2 - num_merged
    )  # output index of the first unprotected odd token
    to_even = tl.where(even < protected, even, protected + turn)
    to_odd = tl.where(odd < protected, odd, of_odd + offset - ahead)
    if not EVEN:  # a row without merges keeps its order
        to_even = tl.where(num_merged == 0, even, to_even)
        to_odd = tl.where(num_merged == 0, odd, to_odd)
    tl.store(keep + to_even, even.to(tl.int64), stays | (inside & (even < protected) & (even < num_valid)))
    tl.store(keep + to_odd, odd.to(tl.int64), inside & (odd < num_valid))
    partner_index = tl.load(partner + s * A + offset, leaves, 0)
    tl.store(source + rank, even.to(tl.int64), leaves)
    tl.store(target + rank, of_odd + partner_index - ahead, leaves)


def pairing(
    best: Tensor, partner: Tensor, num_merged: Sequence[int], counts: Sequence[int], protected: int,
    by_index: bool = True, *, on_device: tuple[Tensor, Tensor] | None = None, alone: int = _ALONE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `pairing.pairing`. `alone` is the maximum number of sources per row that one program ranks."""
    best, partner = best.contiguous(), partner.contiguous()
    rows, width = best.shape
    max_merged, num_kept = max(num_merged), max(count - less for count, less in zip(counts, num_merged, strict=True))
    keep = partner.new_empty(rows, num_kept)
    source, target = partner.new_empty(2, rows, max_merged)
    fewer, num_valid = on_device or (best, best)
    block = max(16, triton.next_power_of_2(width))
    ranks = partner if width <= alone else rank(best)
    _pair[(rows,)](
        best, partner, ranks, fewer, num_valid, keep, source, target, num_merged[0], counts[0], protected, width,
        num_kept, max_merged, EVEN=on_device is None, BY_INDEX=by_index, RANKED=width > alone, BLOCK=block,
        CHUNK=max(16, min(64, _MATRIX // block)), num_warps=8,
    )  # fmt: skip
    return keep, source, target
