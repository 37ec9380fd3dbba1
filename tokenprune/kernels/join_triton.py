# SPDX-License-Identifier: Apache-2.0
"""The kernel of `join.py`: a program for each token that stays adds up its members, in their order, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_FEW = 2**21  # targets that all programs together read, 16 MB, in less time than a sort is launched


@triton.jit
def _join(x, keep, own, source, weight, first, out, D, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stays = row
    if KEEP:
        stays = tl.load(keep + row)
    value = tl.load(x + stays * D + at, at < D, 0.0)
    total = tl.load(own + row).to(tl.float32)
    mass = value.to(tl.float32) * total
    start, end = tl.load(first + row), tl.load(first + row + 1)
    for member in range(start, end):
        part = tl.load(weight + member).to(tl.float32)
        mass += tl.load(x + tl.load(source + member) * D + at, at < D, 0.0).to(tl.float32) * part
        total += part
    mean = (mass / tl.where(total > 0, total, 1.0)).to(value.dtype)
    tl.store(out + row * D + at, tl.where((end > start) & (total > 0), mean, value), at < D)


@triton.jit(do_not_specialize=["R"])
def _join_few(
    x, keep, own, source, target, weight, out, R, D, KEEP: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Look for a row's members among all tokens that join, which need not be sorted then."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stays = row
    if KEEP:
        stays = tl.load(keep + row)
    value = tl.load(x + stays * D + at, at < D, 0.0)
    total = tl.load(own + row).to(tl.float32)
    mass = value.to(tl.float32) * total
    members = 0
    for start in range(0, R, CHUNK):
        one = start + tl.arange(0, CHUNK)
        joins = tl.load(target + one, one < R, -1) == row
        left = tl.sum(joins.to(tl.int32), 0)
        members += left
        while left > 0:
            member = tl.min(tl.where(joins, one, start + CHUNK), 0)
            part = tl.load(weight + member).to(tl.float32)
            mass += tl.load(x + tl.load(source + member) * D + at, at < D, 0.0).to(tl.float32) * part
            total += part
            joins = joins & (one != member)
            left -= 1
    mean = (mass / tl.where(total > 0, total, 1.0)).to(value.dtype)
    tl.store(out + row * D + at, tl.where((members > 0) & (total > 0), mean, value), at < D)


def join(
    x: Tensor, keep: Tensor | None, own: Tensor, source: Tensor, target: Tensor, weight: Tensor, *, block: int = 1024,
    few: bool | None = None,
) -> Tensor:  # fmt: skip
    """See `join.join`. block: features of a program at most. few: whether each program looks for its members, which
    spares a sort; None: where that reads little."""
    count, width = len(own), x.shape[1]
    out = x.new_empty(count, width)
    if not out.numel():
        return out
    block = min(block, triton.next_power_of_2(width))
    grid, kept = (count, triton.cdiv(width, block)), x if keep is None else keep
    if len(target) * count * grid[1] <= _FEW if few is None else few:
        _join_few[grid](
            x.contiguous(), kept, own, source, target, weight, out, len(target), width, KEEP=keep is not None,
            BLOCK=block, CHUNK=max(16, min(128, triton.next_power_of_2(len(target)))),
        )  # fmt: skip
        return out
    order = target.argsort(stable=True)
    # Where in that order the members of each row start.
    first = torch.searchsorted(target[order], torch.arange(count + 1, device=x.device))
    _join[grid](
        x.contiguous(), kept, own, source[order], weight[order], first, out, width, KEEP=keep is not None, BLOCK=block
    )
    return out


@triton.jit(do_not_specialize=["N", "nowhere"])
def _destinations(
    assign, mask, places, weight, own, target, out, N, nowhere, WEIGHT: tl.constexpr, BLOCK: tl.constexpr
):
    s = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    to = tl.load(assign + s * N + at, inside, -1)
    absorbed = inside & (to >= 0) & (tl.load(mask + s * N + at, inside, 0) != 0)
    itself = absorbed & (to == at)
    one = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHT:
        one = tl.load(weight + s * N + at, inside, 0.0).to(tl.float32)
    tl.store(own + tl.load(places + s * N + at, itself, 0), one, itself)
    into = tl.load(places + s * N + tl.where(absorbed, to, 0), absorbed, 0)
    tl.store(target + s * N + at, tl.where(absorbed & (to != at), into, nowhere), inside)
    tl.store(out + s * N + at, one, inside)


def destinations(
    assign: Tensor, mask: Tensor, places: Tensor, weight: Tensor | None, nowhere: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `join.destinations`."""
    assign, mask, places = assign.contiguous(), mask.contiguous(), places.contiguous()
    rows, count = assign.shape
    own = torch.zeros(nowhere, dtype=torch.float32, device=places.device)
    target, out = torch.empty_like(places).flatten(), own.new_empty(rows * count)
    if assign.numel():
        block = min(1024, triton.next_power_of_2(count))
        _destinations[triton.cdiv(count, block), rows](
            assign, mask, places, own if weight is None else weight.contiguous(), own, target, out, count, nowhere,
            WEIGHT=weight is not None, BLOCK=block,
        )  # fmt: skip
    return own, target, out
