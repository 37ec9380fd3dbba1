# SPDX-License-Identifier: Apache-2.0
"""The kernels of `pairing.py`: a program for each row counts who is more similar, so that nothing is sorted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.rank_triton import rank

_MATRIX = 2**14  # comparisons of a program at a time
_ALONE = 512  # sources of a row that its own program ranks; of more a launch of many does, before it


@triton.jit(do_not_specialize=["protected", "real", "A"])
def _sources(best, partner, counts, value, place, protected, real, A, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if not EVEN:
        real = tl.load(counts + s).to(tl.int32)
    inside = at < A
    can = inside & (2 * at >= protected) & (2 * at < real)
    # Float32 from 8 to 16 has steps of `match.TIE`.
    alike = (tl.load(best + s * A + at, inside, 0.0) + 12.0) - 12.0
    tl.store(value + s * A + at, tl.where(can, alike, float("-inf")), inside)
    tl.store(place + s * A + at, tl.where(can, tl.load(partner + s * A + at, inside, 0), 0), inside)


def as_sources(best: Tensor, partner: Tensor, protected: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `pairing.as_sources`."""
    best, partner = best.contiguous(), partner.contiguous()
    value, place = torch.empty_like(best), torch.empty_like(partner)
    rows, width = best.shape
    if best.numel():
        block = min(1024, triton.next_power_of_2(width))
        _sources[triton.cdiv(width, block), rows](
            best,
            partner,
            best if real is None else real,
            value,
            place,
            protected,
            2 * width,
            width,
            EVEN=real is None,
            BLOCK=block,
        )
    return value, place


@triton.jit(do_not_specialize=["gone", "real", "protected", "A", "M", "R"])
def _pair(
    best, partner, ranks, gone_of, real_of, keep, source, target, gone, real, protected, A, M, R,
    EVEN: tl.constexpr, BY_PLACE: tl.constexpr, RANKED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(0).to(tl.int64)
    best += s * A
    keep += s * M
    source += s * R
    target += s * R
    if not EVEN:
        gone = tl.load(gone_of + s).to(tl.int32)
        real = tl.load(real_of + s).to(tl.int32)
    at = tl.arange(0, BLOCK)
    inside = at < A
    rank = tl.zeros([BLOCK], tl.int32)
    if RANKED:
        rank = tl.load(ranks + s * A + at, inside, 0).to(tl.int32)
    else:
        mine = tl.load(best + at, inside, float("-inf"))
        for start in range(0, A, CHUNK):
            other = start + tl.arange(0, CHUNK)
            theirs = tl.load(best + other, other < A, float("-inf"))
            more, tied = theirs[None, :] > mine[:, None], theirs[None, :] == mine[:, None]
            before = (more | (tied & (other[None, :] < at[:, None]))) & (other < A)[None, :]
            rank += tl.sum(before.to(tl.int32), 1)
    # After a row's own numbers: the first token, which there is.
    for start in range(0, M, BLOCK):
        tl.store(keep + start + at, tl.zeros([BLOCK], tl.int64), (start + at >= real - gone) & (start + at < M))
    for start in range(0, R, BLOCK):
        behind = (start + at >= gone) & (start + at < R)
        tl.store(source + start + at, tl.zeros([BLOCK], tl.int64), behind)
        tl.store(target + start + at, tl.zeros([BLOCK], tl.int64), behind)
    leaves = inside & (rank < gone)
    even, odd = 2 * at, 2 * at + 1
    stays = inside & (even >= protected) & (even < real) & (rank >= gone)
    turn = tl.cumsum(stays.to(tl.int32), 0) - 1
    if not BY_PLACE:
        turn = rank - gone
    ahead = protected // 2
    of_odd = protected + (real + 1) // 2 - (protected + 1) // 2 - gone  # where the first unprotected one stands
    to_even = tl.where(even < protected, even, protected + turn)
    to_odd = tl.where(odd < protected, odd, of_odd + at - ahead)
    if not EVEN:  # nothing leaves: all keep their order
        to_even = tl.where(gone == 0, even, to_even)
        to_odd = tl.where(gone == 0, odd, to_odd)
    tl.store(keep + to_even, even.to(tl.int64), stays | (inside & (even < protected) & (even < real)))
    tl.store(keep + to_odd, odd.to(tl.int64), inside & (odd < real))
    found = tl.load(partner + s * A + at, leaves, 0)
    tl.store(source + rank, even.to(tl.int64), leaves)
    tl.store(target + rank, of_odd + found - ahead, leaves)


def pairing(
    best: Tensor, partner: Tensor, gone: Sequence[int], counts: Sequence[int], protected: int, by_place: bool = True,
    *, on_device: tuple[Tensor, Tensor] | None = None, alone: int = _ALONE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `pairing.pairing`. alone: sources of a row that its own program ranks at most."""
    best, partner = best.contiguous(), partner.contiguous()
    rows, width = best.shape
    most, left = max(gone), max(count - less for count, less in zip(counts, gone, strict=True))
    keep = partner.new_empty(rows, left)
    source, target = partner.new_empty(2, rows, most)
    fewer, real = on_device or (best, best)
    block = max(16, triton.next_power_of_2(width))
    ranks = partner if width <= alone else rank(best)
    _pair[(rows,)](
        best, partner, ranks, fewer, real, keep, source, target, gone[0], counts[0], protected, width, left, most,
        EVEN=on_device is None, BY_PLACE=by_place, RANKED=width > alone, BLOCK=block,
        CHUNK=max(16, min(64, _MATRIX // block)), num_warps=8,
    )  # fmt: skip
    return keep, source, target
