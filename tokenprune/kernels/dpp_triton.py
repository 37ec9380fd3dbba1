# SPDX-License-Identifier: Apache-2.0
"""The kernel of `dpp.py`: one launch for each pick, which adds a row to the factor and leaves the next candidates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.dpp import DEPENDENT, rank_dependent


@triton.jit(do_not_specialize=["step", "N", "most", "segments", "groups"])
def _factor_row(
    a, b, own, last, left, mask, number, factor, taken, value, place, ridge, step, N, D, most, segments,
    a_segment, a_row, a_feature, b_segment, b_row, b_feature, groups,
    DEPENDENT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    # Each program has a block of tokens and leaves their best candidate to the next launch. Launches take turns with
    # two sets of candidates. The first one, step -1, only leaves candidates. The value of a candidate is what it adds,
    # or below 0 where it says nothing new.
    s = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    if step >= tl.load(number + s):
        return
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = at < N
    mine = tl.load(own + s * N + at, inside, 0.0)
    adds = tl.load(left + s * N + at, inside, 0.0)
    barred = (tl.load(mask + s * N + at, inside, 0) == 0) | (tl.load(taken + s * N + at, inside, 0) != 0)
    if step >= 0:
        of_block = tl.arange(0, BLOCK_G)
        read = (step % 2 * segments + s) * groups + of_block
        added, winner = tl.max(
            tl.load(value + read, of_block < groups, float("-inf")), 0,
            return_indices=True, return_indices_tie_break_left=True,
        )  # fmt: skip
        pick = tl.load(place + (step % 2 * segments + s) * groups + winner).to(tl.int64)
        tl.store(taken + s * N + at, at == pick, inside & (at == pick))
        barred = barred | (at == pick)
        rows = factor + s * most * N
        new = tl.zeros([BLOCK_N], tl.float32)
        if added > 0:
            explained = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
            for start in range(0, step, BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                of_pick = tl.load(rows + k.to(tl.int64) * N + pick, k < step, 0.0)
                tile = rows + k[:, None].to(tl.int64) * N + at[None, :]
                explained += tl.load(tile, inside[None, :] & (k[:, None] < step), 0.0) * of_pick[:, None]
            product = tl.zeros([BLOCK_N], tl.float32)
            for start in range(0, D, BLOCK_D):
                d = start + tl.arange(0, BLOCK_D)
                picked = tl.load(a + s * a_segment + pick * a_row + d * a_feature, d < D, 0.0)
                tile = b + s * b_segment + at[:, None].to(tl.int64) * b_row + d[None, :] * b_feature
                product += tl.sum(tl.load(tile, inside[:, None] & (d[None, :] < D), 0.0) * picked[None, :], 1)
            new = (product - tl.sum(explained, 0)) / tl.sqrt_rn(added + ridge)
        tl.store(rows + step.to(tl.int64) * N + at, new, inside)
        adds = tl.maximum(adds - new * new, 0.0)
        tl.store(left + s * N + at, adds, inside)
    rank = tl.where(adds > DEPENDENT * mine, adds, tl.load(last + s * N + at, inside, 0.0))
    rank = tl.where(barred | (at >= N), float("-inf"), rank)
    write = ((step + 1) % 2 * segments + s) * groups + block
    best, first = tl.max(rank, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(value + write, best)
    tl.store(place + write, block * BLOCK_N + first)


def greedy_dpp(
    a: Tensor,
    b: Tensor,
    mask: Tensor,
    number: Tensor,
    most: int,
    ridge: float = 0.0,
    own: Tensor | None = None,
    *,
    blocks: tuple[int, int, int] = (32, 128, 16),
) -> Tensor:
    """See `dpp.greedy_dpp`. blocks: tokens of a program; features, and rows of the factor, that it reads at a
    time."""
    segments, count, width = a.shape
    mask = mask.contiguous()
    taken = torch.zeros_like(mask)
    if not (segments and count and most > 0):
        return taken
    own = ((a * b).sum(2) if own is None else own).clamp(min=0).contiguous()
    groups = triton.cdiv(count, blocks[0])
    factor = torch.empty(segments, most, count, dtype=torch.float32, device=a.device)
    value = torch.empty(2, segments, groups, dtype=torch.float32, device=a.device)
    place = torch.empty_like(value, dtype=torch.int32)
    last, left = rank_dependent(own), own.clone()
    for step in range(-1, most):
        _factor_row[groups, segments](
            a, b, own, last, left, mask, number, factor, taken, value, place, ridge, step, count, width, most, segments,
            *a.stride(), *b.stride(), groups,
            DEPENDENT=DEPENDENT, BLOCK_N=blocks[0], BLOCK_D=blocks[1], BLOCK_K=blocks[2],
            BLOCK_G=triton.next_power_of_2(groups),
        )  # fmt: skip
    return taken
