# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `farthest.py`: a program that walks a similarity table, or one launch per pick."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.farthest import distance_to_nearest, fits_table
from tokenprune.kernels.match_triton import best_match, choose_block_sizes, cosine_tile, inverse_norm
from tokenprune.kernels.target_triton import cast_for_dot


@triton.jit(do_not_specialize=["N"])
def _table(
    x, inverse, mask, table, N, D, segment, row, feature,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    columns = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    x += s * segment
    inverse += s * N
    similarity = cosine_tile(
        x, x, inverse, inverse, rows, columns, N, N, D, row, feature, row, feature, BLOCK_A, BLOCK_B, BLOCK_D
    )
    valid = tl.load(mask + s * N + columns, columns < N, 0) != 0
    similarity = tl.where(valid[None, :] & (rows[:, None] != columns[None, :]), similarity, float("-inf"))
    offset = table + s * N * N + rows[:, None].to(tl.int64) * N + columns[None, :]
    tl.store(offset, similarity, (rows[:, None] < N) & (columns[None, :] < N))


@triton.jit
def _rank(distance, barred):
    """Return the rank of a distance: -inf if barred, and inf for NaN."""
    return tl.where(barred, float("-inf"), tl.where(distance == distance, distance, float("inf")))


@triton.jit
def _closer(nearest_distance, similarity, first):
    distance = 1 - similarity
    return tl.where(first, distance, tl.minimum(nearest_distance, distance, propagate_nan=tl.PropagateNan.ALL))


@triton.jit(do_not_specialize=["N"])
def _walk(table, nearest, mask, budget, taken, N, BLOCK: tl.constexpr):
    # One program per segment needs no synchronization.
    s = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    inside = offset < N
    valid = tl.load(mask + s * N + offset, inside, 0) != 0
    nearest_distance = tl.load(nearest + s * N + offset, inside, 0.0)
    barred = valid == 0
    for step in range(tl.load(budget + s)):
        pick = tl.argmax(_rank(nearest_distance, barred), 0, tie_break_left=True)
        barred = barred | (offset == pick)
        similarity = tl.load(table + (s * N + pick) * N + offset, inside, 0.0)
        nearest_distance = _closer(nearest_distance, similarity, step == 0)
    tl.store(taken + s * N + offset, barred & valid, inside)


@triton.jit(do_not_specialize=["step", "N", "segments", "groups"])
def _step(
    x, inverse, mask, budget, nearest, taken, value, index, step, N, D, segments, segment, row, feature, groups,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # Each program writes the best candidate of its block for the next launch; the end of a launch synchronizes all
    # programs. Candidates are double buffered between launches. The first launch (step -1) only writes candidates.
    s = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if step >= tl.load(budget + s):
        return
    offset = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offset < N
    nearest_distance = tl.load(nearest + s * N + offset, inside, 0.0)
    barred = (tl.load(mask + s * N + offset, inside, 0) == 0) | (tl.load(taken + s * N + offset, inside, 0) != 0)
    if step >= 0:
        of_block = tl.arange(0, BLOCK_G)
        read = (step % 2 * segments + s) * groups + of_block
        winner = tl.argmax(tl.load(value + read, of_block < groups, float("-inf")), 0, tie_break_left=True)
        pick = tl.load(index + (step % 2 * segments + s) * groups + winner)
        tl.store(taken + s * N + offset, offset == pick, inside & (offset == pick))
        barred = barred | (offset == pick)
        total = tl.zeros([BLOCK_N], tl.float32)
        mine = x + s * segment
        for start in range(0, D, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            picked = tl.load(mine + pick.to(tl.int64) * row + d * feature, d < D, 0.0).to(tl.float32)
            tile = tl.load(mine + offset[:, None] * row + d[None, :] * feature, inside[:, None] & (d[None, :] < D), 0.0)
            total += tl.sum(tile.to(tl.float32) * picked[None, :], 1)
        similarity = total * tl.load(inverse + s * N + offset, inside, 0.0) * tl.load(inverse + s * N + pick)
        nearest_distance = _closer(nearest_distance, similarity, step == 0)
        tl.store(nearest + s * N + offset, nearest_distance, inside)
    rank = _rank(nearest_distance, barred | (offset >= N))
    write = ((step + 1) % 2 * segments + s) * groups + block
    best, first = tl.max(rank, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value + write, best)
    tl.store(index + write, block * BLOCK_N + first)


def farthest(
    features: Tensor,
    mask: Tensor,
    budget: Tensor,
    max_budget: int,
    *,
    table: bool | None = None,
    blocks: tuple[int, int, int] | None = None,
    rows: int = 32,
) -> Tensor:
    """See `farthest.farthest`.

    Args:
        table: Keep all similarities in memory. None decides by size.
        blocks: Rows, columns and features of a tile of the table.
        rows: Tokens per program, without a table.
    """
    segments, count, width = features.shape
    mask = mask.contiguous()
    taken = torch.zeros_like(mask)
    if not (segments and count and max_budget > 0):
        return taken
    inverse = inverse_norm(features)
    if fits_table(features) if table is None else table:
        features = cast_for_dot(features)
        block_a, block_b, block_d = blocks or choose_block_sizes(features)
        similarity = torch.empty(segments, count, count, dtype=torch.float32, device=features.device)
        _table[triton.cdiv(count, block_a), triton.cdiv(count, block_b), segments](
            features, inverse, mask, similarity, count, width, *features.stride(),
            BLOCK_A=block_a, BLOCK_B=block_b, BLOCK_D=block_d, num_warps=8, num_stages=3,
        )  # fmt: skip
        block = triton.next_power_of_2(count)
        nearest = 1 - similarity.amax(dim=2)
        _walk[segments,](
            similarity, nearest, mask, budget, taken, count, BLOCK=block, num_warps=min(32, max(4, block // 512))
        )
        return taken
    nearest = distance_to_nearest(features, mask, lambda *a, **k: best_match(*a, **k, blocks=blocks))
    groups = triton.cdiv(count, rows)
    value = torch.empty(2, segments, groups, dtype=torch.float32, device=features.device)
    index = torch.empty_like(value, dtype=torch.int32)
    for step in range(-1, max_budget):
        _step[groups, segments](
            features, inverse, mask, budget, nearest, taken, value, index, step, count, width, segments,
            *features.stride(), groups, BLOCK_N=rows, BLOCK_D=256, BLOCK_G=triton.next_power_of_2(groups),
        )  # fmt: skip
    return taken
