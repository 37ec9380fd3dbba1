# SPDX-License-Identifier: Apache-2.0
"""The kernels of `coverage.py`: a program sums up what a few candidates add, and reads the table once. Picks are one
launch each, whose end is what lets all programs agree on the next."""

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
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = table + s * segment + at[None, :].to(tl.int64) * column
    total = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    for start in range(0, R, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        covers = tl.load(mine + r[:, None].to(tl.int64) * row, (at[None, :] < N) & (r[:, None] < R), 0.0)
        total += _added(covers, tl.load(cover + s * R + r, r < R, float("inf")))
    tl.store(gain + s * N + at, tl.sum(total, 0), at < N)


@triton.jit(do_not_specialize=["step", "N", "R", "segments", "groups"])
def _cover(
    table, cover, factor, mask, number, taken, value, place, step, N, R, segments, segment, row, column, groups,
    WEIGHED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # Each program has a block of candidates and leaves the best of them to the next launch. Launches take turns with
    # two sets of these, and with two of how well rows are covered. The first one, step -1, only leaves candidates.
    s = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    wanted = tl.load(number + s)
    if step >= wanted:
        return
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < N
    barred = (tl.load(mask + s * N + at, inside, 0) == 0) | (tl.load(taken + s * N + at, inside, 0) != 0)
    pick = -1
    if step >= 0:
        of_block = tl.arange(0, BLOCK_G)
        read = (step % 2 * segments + s) * groups + of_block
        winner = tl.argmax(tl.load(value + read, of_block < groups, float("-inf")), 0, tie_break_left=True)
        pick = tl.load(place + (step % 2 * segments + s) * groups + winner)
        tl.store(taken + s * N + at, at == pick, inside & (at == pick))
        barred = barred | (at == pick)
    if step + 1 < wanted:
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
            tile = mine + r[:, None].to(tl.int64) * row + at[None, :].to(tl.int64) * column
            total += _added(tl.load(tile, inside[None, :] & (r[:, None] < R), 0.0), covered)
        gain = tl.sum(total, 0)
        if WEIGHED:
            gain *= tl.load(factor + s * N + at, inside, 0.0)
        gain = tl.where(barred | (at >= N), float("-inf"), gain)
        write = ((step + 1) % 2 * segments + s) * groups + block
        best, first = tl.max(gain, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(value + write, best)
        tl.store(place + write, block * BLOCK_N + first)


def coverage_gain(table: Tensor, cover: Tensor, *, blocks: tuple[int, int] = (32, 64)) -> Tensor:
    """See `coverage.coverage_gain`. blocks: candidates and rows of a program at a time."""
    segments, rows, count = table.shape
    gain = torch.empty(segments, count, dtype=torch.float32, device=table.device)
    if gain.numel():
        _gain[triton.cdiv(count, blocks[0]), segments](
            table, cover.contiguous(), gain, count, rows, *table.stride(), BLOCK_N=blocks[0], BLOCK_R=blocks[1],
        )  # fmt: skip
    return gain


def most_covering(
    table: Tensor,
    mask: Tensor,
    number: Tensor,
    most: int,
    factor: Tensor | None = None,
    *,
    blocks: tuple[int, int] = (32, 64),
) -> Tensor:
    """See `coverage.most_covering`. blocks: candidates and rows of a program at a time."""
    segments, rows, count = table.shape
    mask = mask.contiguous()
    taken = torch.zeros_like(mask)
    if not (segments and count and most > 0):
        return taken
    groups = triton.cdiv(count, blocks[0])
    cover = torch.empty(2, segments, rows, dtype=torch.float32, device=table.device)
    value = torch.empty(2, segments, groups, dtype=torch.float32, device=table.device)
    place = torch.empty_like(value, dtype=torch.int32)
    weights = value if factor is None else factor.float().contiguous()
    for step in range(-1, most):
        _cover[groups, segments](
            table, cover, weights, mask, number, taken, value, place, step, count, rows, segments, *table.stride(),
            groups, WEIGHED=factor is not None, BLOCK_N=blocks[0], BLOCK_R=blocks[1],
            BLOCK_G=triton.next_power_of_2(groups),
        )  # fmt: skip
    return taken
