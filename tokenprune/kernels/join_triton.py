# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `join.py`. One program per kept token adds its sources in order, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_SEARCHED = 2**21  # targets read by all programs together (16 MB) up to which a search is faster than a sort


@triton.jit
def _join(x, keep, own_weight, source, weight, first, out, D, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept_index = row
    if KEEP:
        kept_index = tl.load(keep + row)
    value = tl.load(x + kept_index * D + offset, offset < D, 0.0)
    total = tl.load(own_weight + row).to(tl.float32)
    mass = value.to(tl.float32) * total
    start, end = tl.load(first + row), tl.load(first + row + 1)
    for member in range(start, end):
        part = tl.load(weight + member).to(tl.float32)
        mass += tl.load(x + tl.load(source + member) * D + offset, offset < D, 0.0).to(tl.float32) * part
        total += part
    mean = (mass / tl.where(total > 0, total, 1.0)).to(value.dtype)
    tl.store(out + row * D + offset, tl.where((end > start) & (total > 0), mean, value), offset < D)


@triton.jit(do_not_specialize=["R"])
def _join_few(
    x, keep, own_weight, source, target, weight, out, R, D, KEEP: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Average each kept token with its sources, like `_join`, for few sources.

    Each program compares all targets with its output row. `_join` needs sources that are sorted by target.
    """
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept_index = row
    if KEEP:
        kept_index = tl.load(keep + row)
    value = tl.load(x + kept_index * D + offset, offset < D, 0.0)
    total = tl.load(own_weight + row).to(tl.float32)
    mass = value.to(tl.float32) * total
    members = 0
    for start in range(0, R, CHUNK):
        candidate = start + tl.arange(0, CHUNK)
        joins = tl.load(target + candidate, candidate < R, -1) == row
        left = tl.sum(joins.to(tl.int32), 0)
        members += left
        while left > 0:
            member = tl.min(tl.where(joins, candidate, start + CHUNK), 0)
            part = tl.load(weight + member).to(tl.float32)
            mass += tl.load(x + tl.load(source + member) * D + offset, offset < D, 0.0).to(tl.float32) * part
            total += part
            joins = joins & (candidate != member)
            left -= 1
    mean = (mass / tl.where(total > 0, total, 1.0)).to(value.dtype)
    tl.store(out + row * D + offset, tl.where((members > 0) & (total > 0), mean, value), offset < D)


def join(
    x: Tensor, keep: Tensor | None, own_weight: Tensor, source: Tensor, target: Tensor, weight: Tensor,
    *, block: int = 1024, few: bool | None = None,
) -> Tensor:  # fmt: skip
    """See `join.join`.

    Args:
        block: Maximum number of features per program.
        few: Search sources instead of sorting them. None decides by the amount of memory read.
    """
    count, width = len(own_weight), x.shape[1]
    out = x.new_empty(count, width)
    if not out.numel():
        return out
    block = min(block, triton.next_power_of_2(width))
    grid, kept = (count, triton.cdiv(width, block)), x if keep is None else keep
    if len(target) * count * grid[1] <= _MAX_SEARCHED if few is None else few:
        _join_few[grid](
            x.contiguous(), kept, own_weight, source, target, weight, out, len(target), width, KEEP=keep is not None,
            BLOCK=block, CHUNK=max(16, min(128, triton.next_power_of_2(len(target)))),
        )  # fmt: skip
        return out
    order = target.argsort(stable=True)
    # Offset of the first source of each row in the sorted order.
    first = torch.searchsorted(target[order], torch.arange(count + 1, device=x.device))
    _join[grid](
        x.contiguous(),
        kept,
        own_weight,
        source[order],
        weight[order],
        first,
        out,
        width,
        KEEP=keep is not None,
        BLOCK=block,
    )
    return out


@triton.jit(do_not_specialize=["N", "num_outputs"])
def _destinations(
    assign,
    mask,
    output_index,
    weight,
    own_weight,
    target,
    out,
    N,
    num_outputs,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    s = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < N
    to = tl.load(assign + s * N + offset, inside, -1)
    absorbed = inside & (to >= 0) & (tl.load(mask + s * N + offset, inside, 0) != 0)
    itself = absorbed & (to == offset)
    member_weight = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHT:
        member_weight = tl.load(weight + s * N + offset, inside, 0.0).to(tl.float32)
    tl.store(own_weight + tl.load(output_index + s * N + offset, itself, 0), member_weight, itself)
    joined = tl.load(output_index + s * N + tl.where(absorbed, to, 0), absorbed, 0)
    tl.store(target + s * N + offset, tl.where(absorbed & (to != offset), joined, num_outputs), inside)
    tl.store(out + s * N + offset, member_weight, inside)


def destinations(
    assign: Tensor, mask: Tensor, output_index: Tensor, weight: Tensor | None, num_outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `join.destinations`."""
    assign, mask, output_index = assign.contiguous(), mask.contiguous(), output_index.contiguous()
    rows, count = assign.shape
    own_weight = torch.zeros(num_outputs, dtype=torch.float32, device=output_index.device)
    target, out = torch.empty_like(output_index).flatten(), own_weight.new_empty(rows * count)
    if assign.numel():
        block = min(1024, triton.next_power_of_2(count))
        _destinations[triton.cdiv(count, block), rows](
            assign, mask, output_index, own_weight if weight is None else weight.contiguous(), own_weight, target, out,
            count, num_outputs, WEIGHT=weight is not None, BLOCK=block,
        )  # fmt: skip
    return own_weight, target, out
