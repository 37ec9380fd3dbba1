# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of `dpp.py`. Each pick is one launch, which adds a row to the factor and writes the next candidates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.dpp import DEPENDENT, rank_dependent


@triton.jit(do_not_specialize=["step", "N", "max_count", "segments", "groups"])
def _factor_row(
    a, b, diagonal, last, left, mask, count, factor, taken, value, index, ridge, step, N, D, max_count, segments,
    a_segment, a_row, a_feature, b_segment, b_row, b_feature, groups,
    DEPENDENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # Each program writes the best candidate of its block for the next launch. Candidates are double buffered between
    # launches. The first launch (step -1) only writes candidates. The value of a candidate is its conditional variance,
    # or negative for a linearly dependent token.
    s = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if step >= tl.load(count + s):
        return
    offset = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = offset < N
    mine = tl.load(diagonal + s * N + offset, inside, 0.0)
    adds = tl.load(left + s * N + offset, inside, 0.0)
    barred = (tl.load(mask + s * N + offset, inside, 0) == 0) | (tl.load(taken + s * N + offset, inside, 0) != 0)
    if step >= 0:
        of_block = tl.arange(0, BLOCK_G)
        read = (step % 2 * segments + s) * groups + of_block
        added, winner = tl.max(
            tl.load(value + read, of_block < groups, float("-inf")), 0,
            return_indices=True, return_indices_tie_break_left=True,
        )  # fmt: skip
        pick = tl.load(index + (step % 2 * segments + s) * groups + winner).to(tl.int64)
        tl.store(taken + s * N + offset, offset == pick, inside & (offset == pick))
        barred = barred | (offset == pick)
        rows = factor + s * max_count * N
        new = tl.zeros([BLOCK_N], tl.float32)
        if added > 0:
            explained = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
            for start in range(0, step, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                of_pick = tl.load(rows + k.to(tl.int64) * N + pick, k < step, 0.0)
                tile = rows + k[:, None].to(tl.int64) * N + offset[None, :]
                explained += tl.load(tile, inside[None, :] & (k[:, None] < step), 0.0) * of_pick[:, None]
            product = tl.zeros([BLOCK_N], tl.float32)
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                picked = tl.load(a + s * a_segment + pick * a_row + d * a_feature, d < D, 0.0)
                tile = b + s * b_segment + offset[:, None].to(tl.int64) * b_row + d[None, :] * b_feature
                product += tl.sum(tl.load(tile, inside[:, None] & (d[None, :] < D), 0.0) * picked[None, :], 1)
            new = (product - tl.sum(explained, 0)) / tl.sqrt_rn(added + ridge)
        tl.store(rows + step.to(tl.int64) * N + offset, new, inside)
        adds = tl.maximum(adds - new * new, 0.0)
        tl.store(left + s * N + offset, adds, inside)
    rank = tl.where(adds > DEPENDENT * mine, adds, tl.load(last + s * N + offset, inside, 0.0))
    rank = tl.where(barred | (offset >= N), float("-inf"), rank)
    write = ((step + 1) % 2 * segments + s) * groups + block
    best, first = tl.max(rank, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value + write, best)
    tl.store(index + write, block * BLOCK_N + first)


def greedy_dpp(
    a: Tensor,
    b: Tensor,
    mask: Tensor,
    count: Tensor,
    max_count: int,
    ridge: float = 0.0,
    diagonal: Tensor | None = None,
    *,
    blocks: tuple[int, int, int] = (32, 128, 16),
) -> Tensor:
    """See `dpp.greedy_dpp`. `blocks` are tokens per program, and features and factor rows per read."""
    segments, num_tokens, width = a.shape
    mask = mask.contiguous()
    taken = torch.zeros_like(mask)
    if not (segments and num_tokens and max_count > 0):
        return taken
    diagonal = ((a * b).sum(2) if diagonal is None else diagonal).clamp(min=0).contiguous()
    groups = triton.cdiv(num_tokens, blocks[0])
    factor = torch.empty(segments, max_count, num_tokens, dtype=torch.float32, device=a.device)
    value = torch.empty(2, segments, groups, dtype=torch.float32, device=a.device)
    index = torch.empty_like(value, dtype=torch.int32)
    last, left = rank_dependent(diagonal), diagonal.clone()
    for step in range(-1, max_count):
        _factor_row[groups, segments](
            a, b, diagonal, last, left, mask, count, factor, taken, value, index, ridge, step, num_tokens, width,
            max_count, segments, *a.stride(), *b.stride(), groups,
            DEPENDENT=DEPENDENT, BLOCK_N=blocks[0], BLOCK_D=blocks[1], BLOCK_K=blocks[2],
            BLOCK_G=triton.next_power_of_2(groups),
        )  # fmt: skip
    return taken
