# SPDX-License-Identifier: Apache-2.0
"""The kernel of `match.py`: a matrix product whose tiles are reduced to their row maxima and thrown away."""

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
    """Return the cosines `[BLOCK_A, BLOCK_B]` of the tokens at `rows` of a and at `columns` of b."""
    total = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    inside_a, inside_b = rows[:, None] < A, columns[None, :] < B
    for start in range(0, D, BLOCK_D):
        at = start + tl.arange(0, BLOCK_D)
        x = tl.load(a + rows[:, None] * row_a + at[None, :] * feature_a, inside_a & (at[None, :] < D), 0.0)
        y = tl.load(b + columns[None, :] * row_b + at[:, None] * feature_b, inside_b & (at[:, None] < D), 0.0)
        # Half precision is multiplied exactly and added up in float32; float32 must not be rounded to TF32.
        total = tl.dot(x, y, total, input_precision="ieee")
    length_a = tl.load(inverse_a + rows, rows < A, 0.0)
    length_b = tl.load(inverse_b + columns, columns < B, 0.0)
    return total * length_a[:, None] * length_b[None, :]


@triton.jit
def _rows_max(value, first):
    """Of each row the maximum and, counted from `first`, its first place."""
    best, at = tl.max(value, 1, return_indices=True, return_indices_tie_break_left=True)
    return best, first + at


@triton.jit(do_not_specialize=["A", "B", "share", "segments"])
def _best(
    a, b, inverse_a, inverse_b, allowed, group_a, group_b, value, place, A, B, D, share, segments,
    segment_a, row_a, feature_a, segment_b, row_b, feature_b,
    ALLOWED: tl.constexpr, GROUPS: tl.constexpr, EXCLUDE_SELF: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Program (i, s, p) finds the best of the p-th share of b for the i-th block of a of segment s.
    s = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_A + tl.arange(0, BLOCK_A)
    best = tl.full([BLOCK_A], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK_A], tl.int32)
    own, own_where = best, where
    for first in range(part * share, tl.minimum(part * share + share, B), BLOCK_B):
        columns = first + tl.arange(0, BLOCK_B)
        alike = cosine_tile(
            a + s * segment_a, b + s * segment_b, inverse_a + s * A, inverse_b + s * B, rows, columns, A, B, D,
            row_a, feature_a, row_b, feature_b, BLOCK_A, BLOCK_B, BLOCK_D,
        )  # fmt: skip
        # What ties is made equal: float32 from 8 to 16 has steps of `match.TIE`. More state for each row would spill.
        alike = (alike + 12.0) - 12.0
        alike = tl.where(alike == alike, alike, -2.0)
        can = columns < B
        if ALLOWED:
            can = can & (tl.load(allowed + s * B + columns, can, 0) != 0)
        alike = tl.where(can[None, :], alike, float("-inf"))
        if EXCLUDE_SELF:
            alike = tl.where(rows[:, None] == columns[None, :], float("-inf"), alike)
        found, at = _rows_max(alike, first)
        # Strictly better only: of equals the first one stays.
        best, where = tl.where(found > best, found, best), tl.where(found > best, at, where)
        if GROUPS:
            of_row = tl.load(group_a + s * A + rows, rows < A, 0)
            of_column = tl.load(group_b + s * B + columns, columns < B, 0)
            found, at = _rows_max(tl.where(of_row[:, None] == of_column[None, :], alike, float("-inf")), first)
            own, own_where = tl.where(found > own, found, own), tl.where(found > own, at, own_where)
    out = (part * segments + s) * A + rows
    tl.store(value + out, best, rows < A)
    tl.store(place + out, where, rows < A)
    if GROUPS:
        out += tl.num_programs(2).to(tl.int64) * segments * A
        tl.store(value + out, own, rows < A)
        tl.store(place + out, own_where, rows < A)


@triton.jit(do_not_specialize=["N", "segment"])
def _inverse_norm(x, out, N, D, segment, row, feature, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    s = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_D):
        at = start + tl.arange(0, BLOCK_D)
        inside = (rows[:, None] < N) & (at[None, :] < D)
        part = tl.load(x + s * segment + rows[:, None] * row + at[None, :] * feature, inside, 0.0).to(tl.float32)
        total += tl.sum(part * part, 1)
    length = tl.sqrt(total)
    tl.store(out + s * N + rows, 1 / tl.where(length < 1e-12, 1e-12, length), rows < N)


def inverse_norm(x: Tensor) -> Tensor:
    """float32 `[S, N]`: what makes each vector of `[S, N, D]` one of length 1."""
    segments, count, width = x.shape
    out = torch.empty(segments, count, dtype=torch.float32, device=x.device)
    if out.numel():
        _inverse_norm[triton.cdiv(count, 16), segments](
            x, out, count, width, *x.stride(), BLOCK_N=16, BLOCK_D=min(256, triton.next_power_of_2(width))
        )
    return out


@triton.jit(do_not_specialize=["parts", "N"])
def _combine(value, place, best, where, parts, N, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Take the best of all shares of b, of equals that of the first; of the own group's, where it has any."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    found = tl.zeros([BLOCK], tl.int32)
    for kind in tl.static_range(1 + GROUPS):
        first = kind * parts.to(tl.int64) * N
        this, this_at = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
        for part in range(parts):
            one = tl.load(value + first + part * N + at, inside, float("-inf"))
            one_at = tl.load(place + first + part * N + at, inside, 0)
            this, this_at = tl.where(one > this, one, this), tl.where(one > this, one_at, this_at)
        there = this > float("-inf")
        most, found = tl.where(there, this, most), tl.where(there, this_at, found)
    tl.store(best + at, most, inside)
    tl.store(where + at, found.to(tl.int64), inside)


def choose_block_sizes(*tensors: Tensor) -> tuple[int, int, int]:
    """Rows, columns and features of a tile of products of tokens `[S, N, D]`."""
    if tensors[0].dtype == torch.float32:
        return 64, 32, 16
    # Three stages of the larger tiles take 96 KiB of shared memory; vectors that begin at odd places (a width of 72)
    # are read element by element, which takes more registers than the larger tiles leave.
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
    """See `match.best_match`. blocks: rows, columns and features of a tile. parts: shares of b that programs of their
    own go through."""
    same = b is a
    a = cast_for_dot(a)
    b = a if same else cast_for_dot(b)
    (segments, count, width), others_count = a.shape, b.shape[1]
    block_a, block_b, block_d = blocks or choose_block_sizes(a, b)
    groups = group_a is not None and group_b is not None
    if groups and blocks is None:
        block_b = min(block_b, 64)  # what is best in a row's own group takes registers too
    if parts is None:
        parts = max(1, _PROGRAMS // max(1, segments * triton.cdiv(count, block_a)))
    share = max(1, triton.cdiv(triton.cdiv(others_count, block_b), parts)) * block_b
    parts = max(1, triton.cdiv(others_count, share))
    value = torch.empty(1 + groups, parts, segments, count, dtype=torch.float32, device=a.device)
    whole = parts == 1 and not groups  # what a program finds is the answer
    place = torch.empty_like(value, dtype=torch.int32)
    if segments * count:
        flags = a if allowed is None else allowed.contiguous()
        of_a, of_b = (a, b) if group_a is None or group_b is None else (group_a.contiguous(), group_b.contiguous())
        inverse_a = inverse_norm(a)
        _best[triton.cdiv(count, block_a), segments, parts](
            a, b, inverse_a, inverse_a if b is a else inverse_norm(b), flags, of_a, of_b, value, place, count,
            others_count, width, share, segments, *a.stride(), *b.stride(), ALLOWED=allowed is not None, GROUPS=groups,
            EXCLUDE_SELF=exclude_self, BLOCK_A=block_a, BLOCK_B=block_b, BLOCK_D=block_d, num_warps=8, num_stages=3,
        )  # fmt: skip
    if whole:
        return value[0, 0], place[0, 0].long()
    best = value.new_empty(segments, count)
    where = torch.empty_like(best, dtype=torch.int64)
    if segments * count:
        _combine[(triton.cdiv(best.numel(), 256),)](
            value, place, best, where, parts, best.numel(), GROUPS=groups, BLOCK=256
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
    alike = cosine_tile(
        a + s * segment_a, b + s * segment_b, inverse_a + s * A, inverse_b + s * B, rows, columns, A, B, D,
        row_a, feature_a, row_b, feature_b, BLOCK_A, BLOCK_B, BLOCK_D,
    )  # fmt: skip
    inside = (rows[:, None] < A) & (columns[None, :] < B)
    tl.store(out + (s * A + rows[:, None]) * B + columns[None, :], alike, inside)


def cosines(a: Tensor, b: Tensor, *, blocks: tuple[int, int, int] = (64, 16, 32)) -> Tensor:
    """See `match.cosines`. blocks: rows, columns and features of a tile."""
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
