# SPDX-License-Identifier: Apache-2.0
"""The kernel of `coverage.py`: a program sums up what a few candidates add, and reads the table once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["N", "R"])
def _gain(table, cover, gain, N, R, segment, row, column, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = table + s * segment + at[:, None].to(tl.int64) * row
    total = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        covers = tl.load(mine + r[None, :].to(tl.int64) * column, (at[:, None] < N) & (r[None, :] < R), 0.0)
        covered = tl.load(cover + s * R + r, r < R, float("inf"))
        total += tl.maximum(covers - covered[None, :], 0.0)
    tl.store(gain + s * N + at, tl.sum(total, 1), at < N)


def coverage_gain(table: Tensor, cover: Tensor, *, blocks: tuple[int, int] = (8, 256)) -> Tensor:
    """See `coverage.coverage_gain`. blocks: candidates and rows of a program at a time."""
    segments, count, rows = table.shape
    gain = torch.empty(segments, count, device=table.device)
    if gain.numel():
        _gain[triton.cdiv(count, blocks[0]), segments](
            table, cover.contiguous(), gain, count, rows, *table.stride(), BLOCK_N=blocks[0], BLOCK_R=blocks[1],
        )  # fmt: skip
    return gain
