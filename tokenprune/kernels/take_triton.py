# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `take.py`. It finds the lowest selected score bit by bit instead of sorting."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _count_at_least(keys, least, N, BLOCK: tl.constexpr):
    """Return the number of keys that are at least `least`, which is more than 0."""
    total = 0
    for start in range(0, N, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        total += tl.sum((tl.load(keys + offset, offset < N, 0).to(tl.uint32, bitcast=True) >= least).to(tl.int32), 0)
    return total


@triton.jit(do_not_specialize=["P", "N", "segment", "picker", "token"])
def _take(score, mask, count, taken, keys, P, N, segment, picker, token, BLOCK: tl.constexpr):
    s = tl.program_id(0).to(tl.int64)
    taken += s * N
    keys += s * N
    for turn in range(P):
        left = 0
        for start in range(0, N, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            inside = offset < N
            value = tl.load(score + s * segment + turn * picker + offset.to(tl.int64) * token, inside, 0.0).to(
                tl.float32
            )
            value = tl.where(value == value, value, float("-inf"))
            value = tl.where(value == 0, 0.0, value)  # remove the sign of zero
            # With the sign bit flipped (all bits of negative floats), float bits compare as unsigned integers. The key
            # 0, which no float has, marks unavailable tokens.
            bits = value.to(tl.uint32, bitcast=True)
            bits = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
            can = inside & (tl.load(mask + s * N + offset, inside, 0) != 0) & (tl.load(taken + offset, inside, 1) == 0)
            tl.store(keys + offset, tl.where(can, bits, 0).to(tl.int32, bitcast=True), inside)
            left += tl.sum(can.to(tl.int32), 0)
        tl.debug_barrier()  # the code below reads keys that other threads of this program wrote
        num_wanted = tl.minimum(tl.load(count + s * P + turn).to(tl.int32), left)
        lowest = tl.full([], 0, tl.uint32)
        for bit in range(32):
            higher = lowest | (tl.full([], 0x80000000, tl.uint32) >> bit)
            lowest = tl.where(_count_at_least(keys, higher, N, BLOCK) >= num_wanted, higher, lowest)
        room = num_wanted
        if lowest != 0xFFFFFFFF:
            room -= _count_at_least(keys, lowest + 1, N, BLOCK)
        for start in range(0, N, BLOCK):
            offset = start + tl.arange(0, BLOCK)
            bits = tl.load(keys + offset, offset < N, 0).to(tl.uint32, bitcast=True)
            equal = (bits == lowest).to(tl.int32)
            takes = (bits > lowest) | ((equal != 0) & (tl.cumsum(equal, 0) <= room))
            tl.store(taken + offset, takes, takes)
            room -= tl.sum(equal, 0)
        tl.debug_barrier()


def take_in_turn(score: Tensor, mask: Tensor, count: Tensor, max_count: int, *, block: int = 2048) -> Tensor:
    """See `take.take_in_turn`. `block` is the number of tokens per tile."""
    if score.ndim == 2:
        score, count = score.unsqueeze(1), count.unsqueeze(1)
    segments, pickers, width = score.shape
    taken = torch.zeros_like(mask, memory_format=torch.contiguous_format)
    if segments and width:
        keys = torch.empty(segments, width, dtype=torch.int32, device=mask.device)
        _take[segments,](
            score, mask.contiguous(), count.contiguous(), taken, keys, pickers, width, *score.stride(),
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return taken
