# SPDX-License-Identifier: Apache-2.0
"""The kernel of `take.py`: the lowest score that is taken is found bit by bit, so that nothing is sorted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["N", "segment", "picker"])
def _take(score, mask, count, taken, P, N, segment, picker, token, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < N
    real = tl.load(mask + s * N + at, inside, 0) != 0
    left = real
    for turn in range(P):
        value = tl.load(score + s * segment + turn * picker + at.to(tl.int64) * token, inside, 0.0).to(tl.float32)
        value = tl.where(value == value, value, float("-inf"))
        value = tl.where(value == 0, 0.0, value)  # one zero, without a sign
        # The bits of floats, taken as unsigned integers, are in the order of the floats once the sign is turned round.
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)
        wanted = tl.minimum(tl.load(count + s * P + turn).to(tl.int32), tl.sum(left.to(tl.int32), 0))
        lowest = tl.full([], 0, tl.uint32)
        for bit in range(32):
            higher = lowest | (tl.full([], 0x80000000, tl.uint32) >> bit)
            enough = tl.sum((left & (bits >= higher)).to(tl.int32), 0) >= wanted
            lowest = tl.where(enough, higher, lowest)
        above = left & (bits > lowest)
        equal = (left & (bits == lowest)).to(tl.int32)
        room = wanted - tl.sum(above.to(tl.int32), 0)
        left = left & ((above | ((equal != 0) & (tl.cumsum(equal, 0) <= room))) == 0)
    tl.store(taken + s * N + at, real & (left == 0), inside)


def take_in_turn(score: Tensor, mask: Tensor, count: Tensor, most: int) -> Tensor:
    """See `take.take_in_turn`."""
    segments, pickers, width = score.shape
    taken = torch.zeros_like(mask, memory_format=torch.contiguous_format)
    if segments and width:
        block = triton.next_power_of_2(width)
        _take[segments,](
            score, mask.contiguous(), count.contiguous(), taken, pickers, width, *score.stride(), BLOCK=block,
            num_warps=min(32, max(4, block // 512)),
        )  # fmt: skip
    return taken
