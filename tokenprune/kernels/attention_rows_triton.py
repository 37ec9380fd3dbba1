# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `attention_rows`. They read the keys once, because reading keys takes most of the time.

Each program of the first kernel takes a block of keys and the rows of a group of heads. It writes logits and their
partial maxima and sums. A second kernel turns these into probabilities and reduces the heads. The logits take about a
hundredth of the bytes of the keys, so a second pass over them is cheaper than a second pass over the keys.
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
    """Write logits `[B, H, rows, keys]` of a block of keys, and their maxima and sums `[B, H, rows, blocks]`."""
    program = tl.program_id(0)
    block = program % blocks
    kv_heads = heads // group
    kv_head = program // blocks % kv_heads
    batch = (program // blocks // kv_heads).to(tl.int64)

    # One block holds the rows of all heads that share these keys.
    line = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = line < group * rows
    head = (kv_head * group + line // rows).to(tl.int64)
    row = line % rows
    query_index = tl.load(index + batch * index_b + row * index_r, mask=in_range, other=queries)
    column = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = column < keys
    x = dot_products(
        query + batch * query_b + head[:, None] * query_h + query_index[:, None] * query_q,
        key + batch * key_b + kv_head.to(tl.int64) * key_h + column.to(tl.int64)[None, :] * key_k,
        in_range[:, None], inside[None, :], width, PRECISION, BLOCK_WIDTH,
    )  # fmt: skip
    x, _ = apply_mask(
        scale_logits(x, scaling, softcap, SOFTCAP), mask, batch, head[:, None], query_index[:, None],
        column.to(tl.int64)[None, :], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
    )  # fmt: skip
    top = tl.max(x, axis=1)
    total = tl.sum(tl.exp2(x - replace_neg_inf(top)[:, None]), axis=1)

    line = (batch * heads + head) * rows + row
    tl.store(logits + line[:, None] * keys + column[None, :], x, mask=in_range[:, None] & inside[None, :])
    tl.store(tops + line * blocks + block, top, mask=in_range)
    tl.store(sums + line * blocks + block, total, mask=in_range)


@triton.jit(do_not_specialize=LENGTHS)
def _row_weights_kernel(
    logits, tops, sums, out, heads, rows, keys, blocks,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):  # fmt: skip
    """Write probabilities, over the logits or reduced over the heads."""
    tiles = tl.cdiv(keys, BLOCK_KEYS)
    program = tl.program_id(0)
    column = program % tiles * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = column < keys
    row = program // tiles % rows
    batch = (program // tiles // rows).to(tl.int64)
    reduced = tl.zeros([BLOCK_KEYS], tl.float32)
    for first in range(0, heads, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        in_range = head < heads
        line = (batch * heads + head) * rows + row
        top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_HEADS], tl.float32)
        for start in range(0, blocks, BLOCK_PARTS):
            part = start + tl.arange(0, BLOCK_PARTS)
            load_mask = in_range[:, None] & (part < blocks)[None, :]
            offset = line[:, None] * blocks + part[None, :]
            some = tl.load(tops + offset, mask=load_mask, other=float("-inf"))
            higher = tl.maximum(top, tl.max(some, axis=1))
            base = replace_neg_inf(higher)
            shares = tl.load(sums + offset, mask=load_mask, other=0.0) * tl.exp2(some - base[:, None])
            total = total * tl.exp2(top - base) + tl.sum(shares, axis=1)
            top = higher
        load_mask = in_range[:, None] & inside[None, :]
        offset = line[:, None] * keys + column[None, :]
        x = tl.load(logits + offset, mask=load_mask, other=float("-inf"))
        x = tl.exp2(x - replace_neg_inf(top)[:, None]) / tl.where(total == 0, 1.0, total)[:, None]
        if HEADS == 0:
            tl.store(out + offset, x, mask=load_mask)
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
    """See `tokenprune.kernels.attention.attention_rows`. `block_keys` is the number of keys per program."""
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
