# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `coverage.py`. Each program sums the gains of a few candidates and reads the table once.

Each pick is one launch, because the end of a launch synchronizes all programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _added(tile, covered):
    return tl.maximum(tile - covered[:, None], 0.0)


@triton.jit(do_not_specialize=["N", "R"])
def _gain(table, cover, gain, N, R, segment, row, column, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = table + s * segment + offset[None, :].to(tl.int64) * column
    total = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        covers = tl.load(mine + r[:, None].to(tl.int64) * row, (offset[None, :] < N) & (r[:, None] < R), 0.0)
        total += _added(covers, tl.load(cover + s * R + r, r < R, float("inf")))
    tl.store(gain + s * N + offset, tl.sum(total, 0), offset < N)


@triton.jit(do_not_specialize=["step", "N", "R", "segments", "groups"])
def _cover(
    table, cover, factor, mask, count, taken, value, index, step, N, R, segments, segment, row, column, groups,
    WEIGHED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # Each program writes the best candidate of its block for the next launch. Candidates and coverage are double
    # buffered between launches. The first launch (step -1) only writes candidates.
    s = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    num_picks = tl.load(count + s)
    if step >= num_picks:
        return
    offset = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offset < N
    barred = (tl.load(mask + s * N + offset, inside, 0) == 0) | (tl.load(taken + s * N + offset, inside, 0) != 0)
    pick = -1
    if step >= 0:
        of_block = tl.arange(0, BLOCK_G)
        read = (step % 2 * segments + s) * groups + of_block
        winner = tl.argmax(tl.load(value + read, of_block < groups, float("-inf")), 0, tie_break_left=True)
        pick = tl.load(index + (step % 2 * segments + s) * groups + winner)
        tl.store(taken + s * N + offset, offset == pick, inside & (offset == pick))
        barred = barred | (offset == pick)
    if step + 1 < num_picks:
        mine = table + s * segment
        before = cover + (step % 2 * segments + s) * R
        after = cover + ((step + 1) % 2 * segments + s) * R
        total = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
        for start in range(0, R, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            covered = tl.zeros([BLOCK_R], tl.float32)
            if step >= 0:
                at_pick = pick.to(tl.int64) * column  # type: ignore[attr-defined]  # a tensor, to Triton
                picked = tl.load(mine + r.to(tl.int64) * row + at_pick, r < R, 0.0)
                covered = tl.maximum(tl.load(before + r, r < R, 0.0), picked)
            if block == 0:
                tl.store(after + r, covered, r < R)
            tile = mine + r[:, None].to(tl.int64) * row + offset[None, :].to(tl.int64) * column
            total += _added(tl.load(tile, inside[None, :] & (r[:, None] < R), 0.0), covered)
        gain = tl.sum(total, 0)
        if WEIGHED:
            gain *= tl.load(factor + s * N + offset, inside, 0.0)
        gain = tl.where(barred | (offset >= N), float("-inf"), gain)
        write = ((step + 1) % 2 * segments + s) * groups + block
        best, first = tl.max(gain, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(value + write, best)
        tl.store(index + write, block * BLOCK_N + first)


def coverage_gain(table: Tensor, cover: Tensor, *, blocks: tuple[int, int] = (32, 64)) -> Tensor:
    """See `coverage.coverage_gain`. `blocks` are candidates and rows per tile."""
    segments, rows, num_candidates = table.shape
    gain = torch.empty(segments, num_candidates, dtype=torch.float32, device=table.device)
    if gain.numel():
        _gain[triton.cdiv(num_candidates, blocks[0]), segments](
            table, cover.contiguous(), gain, num_candidates, rows, *table.stride(),
            BLOCK_N=blocks[0], BLOCK_R=blocks[1],
        )  # fmt: skip
    return gain


def most_covering(
    table: Tensor,
    mask: Tensor,
    count: Tensor,
    max_count: int,
    factor: Tensor | None = None,
    *,
    blocks: tuple[int, int] = (32, 64),
) -> Tensor:
    """See `coverage.most_covering`. `blocks` are candidates and rows per tile."""
    segments, rows, num_candidates = table.shape
    mask = mask.contiguous()
    taken = torch.zeros_like(mask)
    if not (segments and num_candidates and max_count > 0):
        return taken
    groups = triton.cdiv(num_candidates, blocks[0])
    cover = torch.empty(2, segments, rows, dtype=torch.float32, device=table.device)
    value = torch.empty(2, segments, groups, dtype=torch.float32, device=table.device)
    index = torch.empty_like(value, dtype=torch.int32)
    weights = value if factor is None else factor.float().contiguous()
    for step in range(-1, max_count):
        _cover[groups, segments](
            table, cover, weights, mask, count, taken, value, index, step, num_candidates, rows, segments,
            *table.stride(), groups, WEIGHED=factor is not None, BLOCK_N=blocks[0], BLOCK_R=blocks[1],
            BLOCK_G=triton.next_power_of_2(groups),
        )  # fmt: skip
    return taken
