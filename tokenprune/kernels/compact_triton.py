# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `compact.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["W"])
def _partition(first, order, W, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * W
    total = 0
    for start in range(0, W, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        total += tl.sum((tl.load(first + row + offset, offset < W, 0) != 0).to(tl.int32), 0)
    ahead = 0
    for start in range(0, W, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        flag = (tl.load(first + row + offset, offset < W, 0) != 0).to(tl.int32)
        before = ahead + tl.cumsum(flag, 0) - flag  # True entries before each token
        target = tl.where(flag != 0, before, total + offset - before)
        tl.store(order + row + target, offset.to(tl.int64), offset < W)
        ahead += tl.sum(flag, 0)


def partition(first: Tensor, *, block: int = 1024) -> Tensor:
    """See `compact.partition`. `block` is the number of tokens that a program reads at a time."""
    first = first.contiguous()
    order = torch.empty_like(first, dtype=torch.long)
    if first.numel():
        _partition[len(first),](first, order, first.shape[1], BLOCK=block)
    return order


@triton.jit(do_not_specialize=["rows", "batch", "L", "W"])
def _gather(x, index, out, rows, batch, L, W, inner, BLOCK_W: tl.constexpr, BLOCK_I: tl.constexpr):
    # x: [outer, rows, L, inner], out: [outer, batch, W, inner].
    token = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    offset = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    outer, row = (tl.program_id(2) // batch).to(tl.int64), tl.program_id(2) % batch
    slot = tl.load(index + row * W + token, token < W, 0)
    inside = (token[:, None] < W) & (offset[None, :] < inner)
    start = (outer * rows + row % rows) * L  # one row of x may serve the whole batch
    value = tl.load(x + (start + slot)[:, None] * inner + offset[None, :], inside)
    tl.store(out + ((outer * batch + row) * W + token)[:, None] * inner + offset[None, :], value, inside)


def gather_tokens(x: Tensor, index: Tensor, dim: int, *, block: int = 1024) -> Tensor:
    """See `compact.gather_tokens`. `block` is the number of elements per program."""
    dim = dim % x.ndim
    rows, length = x.shape[dim - 1 : dim + 1]
    outer, inner = x.shape[: dim - 1].numel(), x.shape[dim + 1 :].numel()
    out = x.new_empty(*x.shape[: dim - 1], *index.shape, *x.shape[dim + 1 :])
    if out.numel():
        wide = min(block, triton.next_power_of_2(inner))
        deep = max(1, block // wide)
        batch, width = index.shape
        _gather[triton.cdiv(width, deep), triton.cdiv(inner, wide), outer * batch](
            x.contiguous(), index.contiguous(), out, rows, batch, length, width, inner, BLOCK_W=deep, BLOCK_I=wide
        )
    return out
