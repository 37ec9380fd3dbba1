# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `attention_rows`: the keys are read once, which is what the time goes to.

Each program takes a block of keys and all wanted rows of a group of heads, and writes logits and their partial maxima
and sums; a second kernel turns these into probabilities and reduces the heads. The logits are a hundredth of the keys'
bytes or so, which makes this cheaper than reading the keys again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.attention import check_heads
from tokenprune.kernels.attention_triton import (
    KEY_MASK,
    LENGTHS,
    apply_mask,
    dot_products,
    get_mask_arguments,
    make_rows_contiguous,
    replace_neg_inf,
    scale_logits,
    split_scaling,
)
from tokenprune.kernels.target_triton import cast_for_dot, get_dot_precision

_HEADS = {None: 0, "sum": 1, "mean": 2, "max": 3}


@triton.jit(do_not_specialize=LENGTHS)
def _row_logits_kernel(
    query, key, index, mask, logits, tops, sums,
    heads, group, rows, queries, keys, width, blocks, scaling, softcap, lowest,
    query_b, query_h, query_q, key_b, key_h, key_k, index_b, index_r, mask_b, mask_h, mask_q, mask_k,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Logits `[B, H, rows, keys]` of a block of keys, and their maxima and sums `[B, H, rows, blocks]`."""
    program = tl.program_id(0)
    block = program % blocks
    kv_heads = heads // group
    kv_head = program // blocks % kv_heads
    batch = (program // blocks // kv_heads).to(tl.int64)

    # The rows of all heads that share these keys are the lines of one block.
    line = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = line < group * rows
    head = (kv_head * group + line // rows).to(tl.int64)
    row = line % rows
    place = tl.load(index + batch * index_b + row * index_r, mask=real, other=queries)
    column = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = column < keys
    x = dot_products(
        query + batch * query_b + head[:, None] * query_h + place[:, None] * query_q,
        key + batch * key_b + kv_head.to(tl.int64) * key_h + column.to(tl.int64)[None, :] * key_k,
        real[:, None], inside[None, :], width, PRECISION, BLOCK_WIDTH,
    )  # fmt: skip
    x, _ = apply_mask(
        scale_logits(x, scaling, softcap, SOFTCAP), mask, batch, head[:, None], place[:, None],
        column.to(tl.int64)[None, :], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
    )  # fmt: skip
    top = tl.max(x, axis=1)
    total = tl.sum(tl.exp2(x - replace_neg_inf(top)[:, None]), axis=1)

    line = (batch * heads + head) * rows + row
    tl.store(logits + line[:, None] * keys + column[None, :], x, mask=real[:, None] & inside[None, :])
    tl.store(tops + line * blocks + block, top, mask=real)
    tl.store(sums + line * blocks + block, total, mask=real)


@triton.jit(do_not_specialize=LENGTHS)
def _row_weights_kernel(
    logits, tops, sums, out, heads, rows, keys, blocks,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Probabilities from logits, in their place or reduced over the heads."""
    tiles = tl.cdiv(keys, BLOCK_KEYS)
    program = tl.program_id(0)
    column = program % tiles * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = column < keys
    row = program // tiles % rows
    batch = (program // tiles // rows).to(tl.int64)
    reduced = tl.zeros([BLOCK_KEYS], tl.float32)
    for first in range(0, heads, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        real = head < heads
        line = (batch * heads + head) * rows + row
        top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        for start in range(0, blocks, BLOCK_PARTS):
            part = start + tl.arange(0, BLOCK_PARTS)
            there = real[:, None] & (part < blocks)[None, :]
            at = line[:, None] * blocks + part[None, :]
            some = tl.load(tops + at, mask=there, other=float("-inf"))
            higher = tl.maximum(top, tl.max(some, axis=1))
            base = replace_neg_inf(higher)
            shares = tl.load(sums + at, mask=there, other=0.0) * tl.exp2(some - base[:, None])
            total = total * tl.exp2(top - base) + tl.sum(shares, axis=1)
            top = higher
        there = real[:, None] & inside[None, :]
        at = line[:, None] * keys + column[None, :]
        x = tl.load(logits + at, mask=there, other=float("-inf"))
        x = tl.exp2(x - replace_neg_inf(top)[:, None]) / tl.where(total == 0, 1.0, total)[:, None]
        if HEADS == 0:
            tl.store(out + at, x, mask=there)
        elif HEADS == 3:
            reduced = tl.maximum(reduced, tl.max(x, axis=0))
        else:
            reduced += tl.sum(x, axis=0)
    if HEADS == 2:
        reduced = reduced / heads
    if HEADS != 0:
        tl.store(out + (batch * rows + row) * keys + column, reduced, mask=inside)


def attention_rows(
    query: Tensor,
    key: Tensor,
    index: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float,
    causal: bool = True,
    softcap: float | None = None,
    heads: str | None = None,
    block_keys: int = 64,
) -> Tensor:
    """See `tokenprune.kernels.attention.attention_rows`. block_keys: keys that a program takes."""
    check_heads(heads)
    batch, count, queries, width = query.shape
    keys, rows, group = key.shape[2], index.shape[1], count // key.shape[1]
    blocks = triton.cdiv(keys, block_keys)
    logits = torch.empty(batch, count, rows, keys, dtype=torch.float32, device=query.device)
    tops = torch.empty(batch, count, rows, blocks, dtype=torch.float32, device=query.device)
    sums = torch.empty_like(tops)
    out = logits if heads is None else torch.empty(batch, rows, keys, dtype=torch.float32, device=query.device)
    if not out.numel():
        return out
    query, key = cast_for_dot(make_rows_contiguous(query)), cast_for_dot(make_rows_contiguous(key))
    mask, kind, strides, lowest = get_mask_arguments(mask, query, key)
    scaling, cap = split_scaling(scaling, softcap)
    block_rows = min(64, max(16, triton.next_power_of_2(group * rows)))
    grid = (blocks * key.shape[1] * batch, triton.cdiv(group * rows, block_rows))
    _row_logits_kernel[grid](
        query, key, index, mask, logits, tops, sums, count, group, rows, queries, keys, width, blocks, scaling, cap,
        lowest, *query.stride()[:3], *key.stride()[:3], *index.stride(), *strides,
        CAUSAL=causal and kind <= KEY_MASK, MASK=kind, SOFTCAP=softcap is not None,
        PRECISION=get_dot_precision(query), BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys,
        BLOCK_WIDTH=16 if width <= 16 else 32, num_warps=4, num_stages=3,
    )  # fmt: skip
    tile = 64
    _row_weights_kernel[(triton.cdiv(keys, tile) * rows * batch,)](
        logits, tops, sums, out, count, rows, keys, blocks, HEADS=_HEADS[heads],
        BLOCK_HEADS=8, BLOCK_PARTS=32, BLOCK_KEYS=tile, num_warps=4,
    )  # fmt: skip
    return out
