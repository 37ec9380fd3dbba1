# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `match.py`: matrix products whose tiles are reduced to row maxima and not stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.target_triton import cast_for_dot, get_shared_memory

_PROGRAMS = 264  # enough to fill the largest GPUs twice


@triton.jit
def cosine_tile(
    a, b, inverse_a, inverse_b, rows, columns, A, B, D, row_a, feature_a, row_b, feature_b,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the cosines `[BLOCK_A, BLOCK_B]` of the tokens `rows` of a and `columns` of b."""
    total = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    inside_a, inside_b = rows[:, None] < A, columns[None, :] < B
    for start in range(0, D, BLOCK_D):
        offset = start + tl.arange(0, BLOCK_D)
        x = tl.load(a + rows[:, None] * row_a + offset[None, :] * feature_a, inside_a & (offset[None, :] < D), 0.0)
        y = tl.load(b + columns[None, :] * row_b + offset[:, None] * feature_b, inside_b & (offset[:, None] < D), 0.0)
        # Products of half precision are exact in float32. "ieee" keeps float32 from being rounded to TF32.
        total = tl.dot(x, y, total, input_precision="ieee")
    length_a = tl.load(inverse_a + rows, rows < A, 0.0)
    length_b = tl.load(inverse_b + columns, columns < B, 0.0)
    return total * length_a[:, None] * length_b[None, :]


@triton.jit
def _rows_max(value, first):
    """Return the maximum of each row, and its first index plus `first`."""
    best, index = tl.max(value, 1, return_indices=True, return_indices_tie_break_left=True)
    return best, first + index


@triton.jit(do_not_specialize=["A", "B", "share", "segments"])
def _best(
    a, b, inverse_a, inverse_b, allowed, group_a, group_b, value, index, A, B, D, share, segments,
    segment_a, row_a, feature_a, segment_b, row_b, feature_b,
    ALLOWED: tl.constexpr, GROUPS: tl.constexpr, EXCLUDE_SELF: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Program (i, s, p) finds the best match in share p of b for block i of a in segment s.
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    best_index = tl.zeros([BLOCK_A], tl.int32)
    group_best, group_index = best, best_index
    for first in range(part * share, tl.minimum(part * share + share, B), BLOCK_B):
        columns = first + tl.arange(0, BLOCK_B)
        similarity = cosine_tile(
            a + s * segment_a, b + s * segment_b, inverse_a + s * A, inverse_b + s * B, rows, columns, A, B, D,
            row_a, feature_a, row_b, feature_b, BLOCK_A, BLOCK_B, BLOCK_D,
        )  # fmt: skip
        # Round to steps of `match.TIE`, the spacing of float32 between 8 and 16, so that ties are equal. Tracking ties
        # with more state per row would spill registers.
        similarity = (similarity + 12.0) - 12.0
        similarity = tl.where(similarity == similarity, similarity, -2.0)
        can = columns < B
        if ALLOWED:
            can = can & (tl.load(allowed + s * B + columns, can, 0) != 0)
        similarity = tl.where(can[None, :], similarity, float("-inf"))
        if EXCLUDE_SELF:
            similarity = tl.where(rows[:, None] == columns[None, :], float("-inf"), similarity)
        tile_best, tile_index = _rows_max(similarity, first)
        # Only a strictly larger value replaces the best, so ties go to the lower index.
        best_index = tl.where(tile_best > best, tile_index, best_index)
        best = tl.where(tile_best > best, tile_best, best)
        if GROUPS:
            row_group = tl.load(group_a + s * A + rows, rows < A, 0)
            column_group = tl.load(group_b + s * B + columns, columns < B, 0)
            tile_best, tile_index = _rows_max(
                tl.where(row_group[:, None] == column_group[None, :], similarity, float("-inf")), first
            )
            group_index = tl.where(tile_best > group_best, tile_index, group_index)
            group_best = tl.where(tile_best > group_best, tile_best, group_best)
    out = (part * segments + s) * A + rows
    tl.store(value + out, best, rows < A)
    tl.store(index + out, best_index, rows < A)
    if GROUPS:
        out += tl.num_programs(2).to(tl.int64) * segments * A
        tl.store(value + out, group_best, rows < A)
        tl.store(index + out, group_index, rows < A)


@triton.jit(do_not_specialize=["N", "segment"])
def _inverse_norm(x, out, N, D, segment, row, feature, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_D):
        offset = start + tl.arange(0, BLOCK_D)
        inside = (rows[:, None] < N) & (offset[None, :] < D)
        part = tl.load(x + s * segment + rows[:, None] * row + offset[None, :] * feature, inside, 0.0).to(tl.float32)
        total += tl.sum(part * part, 1)
    length = tl.sqrt(total)
    tl.store(out + s * N + rows, 1 / tl.where(length < 1e-12, 1e-12, length), rows < N)


def inverse_norm(x: Tensor) -> Tensor:
    """Return `1 / norm` of each vector of x `[S, N, D]`, float32 `[S, N]`."""
    segments, count, width = x.shape
    out = torch.empty(segments, count, dtype=torch.float32, device=x.device)
    if out.numel():
        _inverse_norm[triton.cdiv(count, 16), segments](
            x, out, count, width, *x.stride(), BLOCK_N=16, BLOCK_D=min(256, triton.next_power_of_2(width))
        )
    return out


@triton.jit(do_not_specialize=["parts", "N"])
def _combine(value, index, best, where, parts, N, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Combine the maxima over the shares of b. Ties go to the first share. A match within the group wins."""
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < N
    best_value = tl.full([BLOCK], float("-inf"), tl.float32)
    best_index = tl.zeros([BLOCK], tl.int32)
    for kind in tl.static_range(1 + GROUPS):
        first = kind * parts.to(tl.int64) * N
        kind_value, kind_index = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
        for part in range(parts):
            part_value = tl.load(value + first + part * N + offset, inside, float("-inf"))
            part_index = tl.load(index + first + part * N + offset, inside, 0)
            kind_index = tl.where(part_value > kind_value, part_index, kind_index)
            kind_value = tl.where(part_value > kind_value, part_value, kind_value)
        has_match = kind_value > float("-inf")
        best_index = tl.where(has_match, kind_index, best_index)
        best_value = tl.where(has_match, kind_value, best_value)
    tl.store(best + offset, best_value, inside)
    tl.store(where + offset, best_index.to(tl.int64), inside)


def choose_block_sizes(*tensors: Tensor) -> tuple[int, int, int]:
    """Return the rows, columns and features of a tile of products of tokens `[S, N, D]`."""
    if tensors[0].dtype == torch.float32:
        return 64, 32, 16
    # Three stages of the larger tiles take 96 KiB of shared memory. Unaligned vectors (such as width 72) are read
    # element by element, which takes more registers than the larger tiles leave.
    even = all(size % 16 == 0 for x in tensors for size in (x.shape[2], *x.stride()[:2]))
    return (128, 128, 64) if even and get_shared_memory() >= 2**17 else (64, 64, 64)


def best_match(
    a: Tensor,
    b: Tensor,
    allowed: Tensor | None = None,
    *,
    group_a: Tensor | None = None,
    group_b: Tensor | None = None,
    exclude_self: bool = False,
    blocks: tuple[int, int, int] | None = None,
    parts: int | None = None,
) -> tuple[Tensor, Tensor]:
    """See `match.best_match`.

    Args:
        blocks: Rows, columns and features of a tile.
        parts: Number of shares of b, each handled by separate programs.
    """
    same = b is a
    a = cast_for_dot(a)
    b = a if same else cast_for_dot(b)
    (segments, count, width), others_count = a.shape, b.shape[1]
    block_a, block_b, block_d = blocks or choose_block_sizes(a, b)
    groups = group_a is not None and group_b is not None
    if groups and blocks is None:
        block_b = min(block_b, 64)  # the best match within the group takes registers too
    if parts is None:
        parts = max(1, _PROGRAMS // max(1, segments * triton.cdiv(count, block_a)))
    share = max(1, triton.cdiv(triton.cdiv(others_count, block_b), parts)) * block_b
    parts = max(1, triton.cdiv(others_count, share))
    value = torch.empty(1 + groups, parts, segments, count, dtype=torch.float32, device=a.device)
    is_final = parts == 1 and not groups  # the result of each program is final
    index = torch.empty_like(value, dtype=torch.int32)
    if segments * count:
        flags = a if allowed is None else allowed.contiguous()
        of_a, of_b = (a, b) if group_a is None or group_b is None else (group_a.contiguous(), group_b.contiguous())
        inverse_a = inverse_norm(a)
        _best[triton.cdiv(count, block_a), segments, parts](
            a, b, inverse_a, inverse_a if b is a else inverse_norm(b), flags, of_a, of_b, value, index, count,
            others_count, width, share, segments, *a.stride(), *b.stride(), ALLOWED=allowed is not None, GROUPS=groups,
            EXCLUDE_SELF=exclude_self, BLOCK_A=block_a, BLOCK_B=block_b, BLOCK_D=block_d, num_warps=8, num_stages=3,
        )  # fmt: skip
    if is_final:
        return value[0, 0], index[0, 0].long()
    best = value.new_empty(segments, count)
    where = torch.empty_like(best, dtype=torch.int64)
    if segments * count:
        _combine[(triton.cdiv(best.numel(), 256),)](
            value, index, best, where, parts, best.numel(), GROUPS=groups, BLOCK=256
        )
    return best, where


@triton.jit(do_not_specialize=["A", "B"])
def _cosines(
    a, b, inverse_a, inverse_b, out, A, B, D, segment_a, row_a, feature_a, segment_b, row_b, feature_b,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    columns = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    similarity = cosine_tile(
        a + s * segment_a, b + s * segment_b, inverse_a + s * A, inverse_b + s * B, rows, columns, A, B, D,
        row_a, feature_a, row_b, feature_b, BLOCK_A, BLOCK_B, BLOCK_D,
    )  # fmt: skip
    inside = (rows[:, None] < A) & (columns[None, :] < B)
    tl.store(out + (s * A + rows[:, None]) * B + columns[None, :], similarity, inside)


def cosines(a: Tensor, b: Tensor, *, blocks: tuple[int, int, int] = (64, 16, 32)) -> Tensor:
    """See `match.cosines`. `blocks` are rows, columns and features of a tile."""
    a, b = cast_for_dot(a), cast_for_dot(b)
    (segments, count, width), others = a.shape, b.shape[1]
    out = torch.empty(segments, count, others, dtype=torch.float32, device=a.device)
    if out.numel():
        block_a, block_b, block_d = blocks
        _cosines[triton.cdiv(count, block_a), triton.cdiv(others, block_b), segments](
            a, b, inverse_norm(a), inverse_norm(b), out, count, others, width, *a.stride(), *b.stride(),
            BLOCK_A=block_a, BLOCK_B=block_b, BLOCK_D=block_d,
        )  # fmt: skip
    return out
