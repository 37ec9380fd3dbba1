# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of `attention_column_means`.

The first kernel computes the log-sum-exp of each row. The second kernel sums down the columns with it. Both stream
through the attention map and hold one block at a time. They use no atomics, so results do not depend on the order in
which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.attention import check_starts
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
    view_as_bytes,
)
from tokenprune.kernels.target_triton import cast_for_dot, get_dot_precision, get_shared_memory


@triton.jit(do_not_specialize=LENGTHS)
def _row_sums_kernel(
    query, key, valid, mask, begins, ends, sums, heads, group, queries, keys, width, scaling, softcap, lowest,
    query_b, query_h, query_q, key_b, key_h, key_k, valid_b, valid_q, mask_b, mask_h, mask_q, mask_k,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    VALID: tl.constexpr, PACKED: tl.constexpr, FULL_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write base-2 log-sum-exp of each row, `[B, H, queries]`; +inf for rows that do not count."""
    tiles = tl.cdiv(queries, BLOCK_ROWS)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # start with the longest rows of a causal map
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_range = row < queries
    wide = tl.arange(0, BLOCK_WIDTH)
    q_at = query + batch * query_b + head * query_h + row.to(tl.int64)[:, None] * query_q
    if FULL_WIDTH:
        q = tl.load(q_at + wide[None, :], mask=in_range[:, None] & (wide < width)[None, :], other=0.0)
    low = 0
    high = keys
    if CAUSAL:
        high = tl.minimum(high, (tile + 1) * BLOCK_ROWS + keys - queries)
    if PACKED:
        begin = tl.load(begins + row, mask=in_range, other=keys)
        end = tl.load(ends + row, mask=in_range, other=0)
        low = tl.min(begin) // BLOCK_KEYS * BLOCK_KEYS
        high = tl.minimum(high, tl.max(end))
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(low, high, BLOCK_KEYS):
        column = start + tl.arange(0, BLOCK_KEYS)
        k_at = key + batch * key_b + head // group * key_h + column.to(tl.int64)[None, :] * key_k
        if FULL_WIDTH:
            k = tl.load(k_at + wide[:, None], mask=(column < keys)[None, :] & (wide < width)[:, None], other=0.0)
            x = tl.dot(q, k, input_precision=PRECISION)
        else:
            x = dot_products(q_at, k_at, in_range[:, None], (column < keys)[None, :], width, PRECISION, BLOCK_WIDTH)
        x, _ = apply_mask(
            scale_logits(x, scaling, softcap, SOFTCAP), mask, batch, head, row.to(tl.int64)[:, None],
            column.to(tl.int64)[None, :], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
        )  # fmt: skip
        if PACKED:
            x = tl.where((column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None]), x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, axis=1))
        base = replace_neg_inf(higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(x - base[:, None]), axis=1)
        top = higher
    counts = total != 0
    if VALID:
        counts = counts & (tl.load(valid + batch * valid_b + row * valid_q, mask=in_range, other=0) != 0)
    result = tl.where(counts, top + tl.log2(tl.where(counts, total, 1.0)), float("inf"))
    tl.store(sums + (batch * heads + head) * queries + row, result, mask=in_range)


@triton.jit(do_not_specialize=LENGTHS)
def _column_means_kernel(
    query, key, mask, begins, ends, sums, out, heads, group, queries, keys, width, scaling, softcap, lowest,
    query_b, query_h, query_q, key_b, key_h, key_k, mask_b, mask_h, mask_q, mask_k,
    CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, FULL_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write means over the rows that see a column, `[B, H, queries]`.

    Blocks are transposed (columns of the map go down), so that sums over rows stay within a warp.
    """
    tiles = tl.cdiv(queries, BLOCK_KEYS)
    program = tl.program_id(0)
    tile = program % tiles
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    token = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    in_range = token < queries
    column = token + (keys - queries)
    wide = tl.arange(0, BLOCK_WIDTH)
    k_at = key + batch * key_b + head // group * key_h + column.to(tl.int64)[:, None] * key_k
    if FULL_WIDTH:
        k = tl.load(k_at + wide[None, :], mask=in_range[:, None] & (wide < width)[None, :], other=0.0)
    low = 0
    high = queries
    if CAUSAL:
        low = tile * BLOCK_KEYS
    if PACKED:
        begin = tl.load(begins + token, mask=in_range, other=queries)
        end = tl.load(ends + token, mask=in_range, other=0)
        low = tl.maximum(low, tl.min(begin))
        high = tl.max(end)
    low = low // BLOCK_ROWS * BLOCK_ROWS
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    count = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(low, high, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        q_at = query + batch * query_b + head * query_h + row.to(tl.int64)[None, :] * query_q
        if FULL_WIDTH:
            q = tl.load(q_at + wide[:, None], mask=(row < queries)[None, :] & (wide < width)[:, None], other=0.0)
            x = tl.dot(k, q, input_precision=PRECISION)
        else:
            x = dot_products(k_at, q_at, in_range[:, None], (row < queries)[None, :], width, PRECISION, BLOCK_WIDTH)
        base = tl.load(sums + (batch * heads + head) * queries + row, mask=row < queries, other=float("inf"))
        x, visible = apply_mask(
            scale_logits(x, scaling, softcap, SOFTCAP), mask, batch, head, row.to(tl.int64)[None, :],
            column.to(tl.int64)[:, None], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
        )  # fmt: skip
        visible = visible & (base != float("inf"))[None, :]
        if PACKED:
            visible = visible & (row[None, :] >= begin[:, None]) & (row[None, :] < end[:, None])
        total += tl.sum(tl.where(visible, tl.exp2(x - base[None, :]), 0.0), axis=1)
        count += tl.sum(visible.to(tl.float32), axis=1)
    tl.store(out + (batch * heads + head) * queries + token, total / tl.maximum(count, 1.0), mask=in_range)


def attention_column_means(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    starts: Tensor | None = None,
    *,
    scaling: float,
    causal: bool = True,
    softcap: float | None = None,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """See `tokenprune.kernels.attention.attention_column_means`. `block` is the number of rows and columns per tile."""
    check_starts(query, key, mask, starts)
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    sums = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
    out = torch.empty_like(sums)
    if not out.numel():
        return out
    query, key = cast_for_dot(make_rows_contiguous(query)), cast_for_dot(make_rows_contiguous(key))
    mask, kind, strides, lowest = get_mask_arguments(mask, query, key)
    scaling, cap = split_scaling(scaling, softcap)
    begins = ends = query  # not read
    if starts is not None:
        token = torch.arange(keys, device=query.device)
        sequence_index = torch.searchsorted(starts.to(query.device, torch.long), token, right=True)
        begins, ends = starts.to(query.device)[sequence_index - 1], starts.to(query.device)[sequence_index]
    checked = valid if valid is not None else query
    # Half precision: full vectors of the longer side stay on the chip if they fit, and the other side is streamed.
    # Float32: vectors are read in parts, because the three TF32 products take three times the registers.
    half = query.element_size() == 2
    full_width = half and 512 * triton.next_power_of_2(width) <= get_shared_memory()
    long, short = block or ((128, 64) if full_width else (64, 32))
    common = dict(
        CAUSAL=causal and kind <= KEY_MASK, MASK=kind, SOFTCAP=softcap is not None,
        PRECISION=get_dot_precision(query), PACKED=starts is not None, FULL_WIDTH=full_width,
        BLOCK_WIDTH=max(16, triton.next_power_of_2(width)) if full_width else 16,
        num_warps=8, num_stages=3 if full_width else 2,
    )  # fmt: skip
    lengths: tuple[float, ...] = heads, heads // key.shape[1], queries, keys, width, scaling, cap, lowest
    lengths += *query.stride()[:3], *key.stride()[:3]
    _row_sums_kernel[(triton.cdiv(queries, long) * heads * batch,)](
        query, key, view_as_bytes(checked), mask, begins, ends, sums, *lengths, *checked.stride()[:2], *strides,
        VALID=valid is not None, BLOCK_ROWS=long, BLOCK_KEYS=short, **common,
    )  # fmt: skip
    _column_means_kernel[(triton.cdiv(queries, long) * heads * batch,)](
        query, key, mask, begins, ends, sums, out, *lengths, *strides,
        BLOCK_ROWS=short, BLOCK_KEYS=long, **common,
    )  # fmt: skip
    return out
