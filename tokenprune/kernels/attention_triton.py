# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of attention.py.

Rows: the keys are read once, which is what the time goes to. Each program takes a block of keys and all wanted rows of
a group of heads, and writes logits and their partial maxima and sums; a second kernel turns these into probabilities
and reduces the heads. The logits are a hundredth of the keys' bytes or so, which makes this cheaper than reading the
keys again.

Column means: one kernel finds the logarithm of each row's sum of exponentials, a second one goes down the columns with
it. Both stream through the map, of which no more than a block exists at a time. No atomics: results do not depend on
the order in which programs run.

Logits are to base 2: the exponential is then one instruction.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.attention import check_heads, check_starts, lowest_bias

_LOG2E = math.log2(math.e)
# Lengths change with every prompt and step: a kernel compiled for one of them serves all.
_LENGTHS = ["rows", "keys", "queries", "blocks"]
_NO_MASK, _OF_KEYS, _BOOL, _BIAS = range(4)
_HEADS = {None: 0, "sum": 1, "mean": 2, "max": 3}


@triton.jit
def _logits(a, b, scaling, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Logits to base 2 of a block; `_scales` made the factors."""
    if PRECISION == "ieee":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    x = tl.dot(a, b, input_precision=PRECISION) * scaling
    if SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x) - 1)  # tanh
    return x


@triton.jit
def _masked(
    x, mask, batch, head, row, column, queries, keys, mask_b, mask_h, mask_q, mask_k, lowest,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The logits of a block with -inf where no key is seen, and where one is; row, column: broadcast to the block.
    MASK: 0 none, 1 of keys, 2 bool of four axes, 3 additive."""
    seen = (row < queries) & (column < keys)
    if CAUSAL:
        seen = seen & (column <= row + (keys - queries))
    at = mask + batch * mask_b + column * mask_k
    if MASK == 1:
        seen = seen & (tl.load(at, mask=column < keys, other=0) != 0)
    if MASK >= 2:
        value = tl.load(at + head * mask_h + row * mask_q, mask=seen, other=0)
        if MASK == 2:
            seen = seen & (value != 0)
        else:
            value = value.to(tl.float32)
            seen = seen & (value > lowest)
            x += tl.where(seen, value, 0.0) * 1.4426950408889634  # log2(e)
    return tl.where(seen, x, float("-inf")), seen


@triton.jit
def _finite(top):
    """0 in place of the maximum of nothing, so that it can be subtracted."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit(do_not_specialize=_LENGTHS)
def _row_logits_kernel(
    query, key, index, mask, logits, tops, sums, heads, rows, queries, keys, width, blocks, scaling, softcap, lowest,
    query_b, query_h, query_q, key_b, key_h, key_k, index_b, index_r, mask_b, mask_h, mask_q, mask_k,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Logits `[B, H, rows, keys]` of a block of keys, and their maxima and sums `[B, H, rows, blocks]`."""
    program = tl.program_id(0)
    block = program % blocks
    kv_heads = heads // GROUP
    kv_head = program // blocks % kv_heads
    batch = (program // blocks // kv_heads).to(tl.int64)

    # The rows of all heads that share these keys are the lines of one block.
    line = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = line < GROUP * rows
    head = (kv_head * GROUP + line // rows).to(tl.int64)
    row = line % rows
    place = tl.load(index + batch * index_b + row * index_r, mask=real, other=queries)
    column = block * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = column < keys
    wide = tl.arange(0, BLOCK_WIDTH)

    q = tl.load(
        query + batch * query_b + head[:, None] * query_h + place[:, None] * query_q + wide[None, :],
        mask=real[:, None] & (wide < width)[None, :], other=0.0,
    )  # fmt: skip
    k = tl.load(
        key + batch * key_b + kv_head.to(tl.int64) * key_h + column.to(tl.int64)[None, :] * key_k + wide[:, None],
        mask=inside[None, :] & (wide < width)[:, None], other=0.0,
    )  # fmt: skip
    x, _ = _masked(
        _logits(q, k, scaling, softcap, SOFTCAP, PRECISION), mask, batch, head[:, None], place[:, None],
        column.to(tl.int64)[None, :], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
    )  # fmt: skip
    top = tl.max(x, axis=1)
    total = tl.sum(tl.exp2(x - _finite(top)[:, None]), axis=1)

    line = (batch * heads + head) * rows + row
    tl.store(logits + line[:, None] * keys + column[None, :], x, mask=real[:, None] & inside[None, :])
    tl.store(tops + line * blocks + block, top, mask=real)
    tl.store(sums + line * blocks + block, total, mask=real)


@triton.jit(do_not_specialize=_LENGTHS)
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
            base = _finite(higher)
            shares = tl.load(sums + at, mask=there, other=0.0) * tl.exp2(some - base[:, None])
            total = total * tl.exp2(top - base) + tl.sum(shares, axis=1)
            top = higher
        there = real[:, None] & inside[None, :]
        at = line[:, None] * keys + column[None, :]
        x = tl.load(logits + at, mask=there, other=float("-inf"))
        x = tl.exp2(x - _finite(top)[:, None]) / tl.where(total == 0, 1.0, total)[:, None]
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


@triton.jit(do_not_specialize=_LENGTHS)
def _row_sums_kernel(
    query, key, valid, mask, begins, ends, sums, heads, queries, keys, width, scaling, softcap, lowest,
    query_b, query_h, query_q, key_b, key_h, key_k, valid_b, valid_q, mask_b, mask_h, mask_q, mask_k,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    VALID: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """`[B, H, queries]`: logarithms (base 2) of sums of exponentials; +inf for rows that do not count."""
    tiles = tl.cdiv(queries, BLOCK_ROWS)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles  # a causal map's longest rows first
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    real = row < queries
    wide = tl.arange(0, BLOCK_WIDTH)
    q = tl.load(
        query + batch * query_b + head * query_h + row.to(tl.int64)[:, None] * query_q + wide[None, :],
        mask=real[:, None] & (wide < width)[None, :], other=0.0,
    )  # fmt: skip
    low = 0
    high = keys
    if CAUSAL:
        high = tl.minimum(high, (tile + 1) * BLOCK_ROWS + keys - queries)
    if PACKED:
        begin = tl.load(begins + row, mask=real, other=keys)
        end = tl.load(ends + row, mask=real, other=0)
        low = tl.min(begin) // BLOCK_KEYS * BLOCK_KEYS
        high = tl.minimum(high, tl.max(end))
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in range(low, high, BLOCK_KEYS):
        column = start + tl.arange(0, BLOCK_KEYS)
        k = tl.load(
            key + batch * key_b + head // GROUP * key_h + column.to(tl.int64)[None, :] * key_k + wide[:, None],
            mask=(column < keys)[None, :] & (wide < width)[:, None], other=0.0,
        )  # fmt: skip
        x, _ = _masked(
            _logits(q, k, scaling, softcap, SOFTCAP, PRECISION), mask, batch, head, row.to(tl.int64)[:, None],
            column.to(tl.int64)[None, :], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
        )  # fmt: skip
        if PACKED:
            x = tl.where((column[None, :] >= begin[:, None]) & (column[None, :] < end[:, None]), x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, axis=1))
        base = _finite(higher)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(x - base[:, None]), axis=1)
        top = higher
    counts = total != 0
    if VALID:
        counts = counts & (tl.load(valid + batch * valid_b + row * valid_q, mask=real, other=0) != 0)
    result = tl.where(counts, top + tl.log2(tl.where(counts, total, 1.0)), float("inf"))
    tl.store(sums + (batch * heads + head) * queries + row, result, mask=real)


@triton.jit(do_not_specialize=_LENGTHS)
def _column_means_kernel(
    query, key, mask, begins, ends, sums, out, heads, queries, keys, width, scaling, softcap, lowest,
    query_b, query_h, query_q, key_b, key_h, key_k, mask_b, mask_h, mask_q, mask_k,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """`[B, H, queries]`: means over the rows that see a column. Blocks are transposed: columns of the map go down, so
    that sums over its rows stay within a warp."""
    tiles = tl.cdiv(queries, BLOCK_KEYS)
    program = tl.program_id(0)
    tile = program % tiles
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    token = tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    real = token < queries
    column = token + (keys - queries)
    wide = tl.arange(0, BLOCK_WIDTH)
    k = tl.load(
        key + batch * key_b + head // GROUP * key_h + column.to(tl.int64)[:, None] * key_k + wide[None, :],
        mask=real[:, None] & (wide < width)[None, :], other=0.0,
    )  # fmt: skip
    low = 0
    high = queries
    if CAUSAL:
        low = tile * BLOCK_KEYS
    if PACKED:
        begin = tl.load(begins + token, mask=real, other=queries)
        end = tl.load(ends + token, mask=real, other=0)
        low = tl.maximum(low, tl.min(begin))
        high = tl.max(end)
    low = low // BLOCK_ROWS * BLOCK_ROWS
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    count = tl.zeros([BLOCK_KEYS], tl.float32)
    for start in range(low, high, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)
        q = tl.load(
            query + batch * query_b + head * query_h + row.to(tl.int64)[None, :] * query_q + wide[:, None],
            mask=(row < queries)[None, :] & (wide < width)[:, None], other=0.0,
        )  # fmt: skip
        base = tl.load(sums + (batch * heads + head) * queries + row, mask=row < queries, other=float("inf"))
        x, seen = _masked(
            _logits(k, q, scaling, softcap, SOFTCAP, PRECISION), mask, batch, head, row.to(tl.int64)[None, :],
            column.to(tl.int64)[:, None], queries, keys, mask_b, mask_h, mask_q, mask_k, lowest, CAUSAL, MASK,
        )  # fmt: skip
        seen = seen & (base != float("inf"))[None, :]
        if PACKED:
            seen = seen & (row[None, :] >= begin[:, None]) & (row[None, :] < end[:, None])
        total += tl.sum(tl.where(seen, tl.exp2(x - base[None, :]), 0.0), axis=1)
        count += tl.sum(seen.to(tl.float32), axis=1)
    tl.store(out + (batch * heads + head) * queries + token, total / tl.maximum(count, 1.0), mask=real)


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
    logits = torch.empty(batch, count, rows, keys, device=query.device)
    tops = torch.empty(batch, count, rows, blocks, device=query.device)
    sums = torch.empty_like(tops)
    out = logits if heads is None else torch.empty(batch, rows, keys, device=query.device)
    if not out.numel():
        return out
    query, key = _rows_contiguous(query), _rows_contiguous(key)
    mask, kind, strides, lowest = _mask_arguments(mask, query, key)
    scaling, cap = _scales(scaling, softcap)
    block_rows = min(64, max(16, triton.next_power_of_2(group * rows)))
    with torch.cuda.device_of(query):
        grid = (blocks * key.shape[1] * batch, triton.cdiv(group * rows, block_rows))
        _row_logits_kernel[grid](
            query, key, index, mask, logits, tops, sums, count, rows, queries, keys, width, blocks, scaling, cap,
            lowest, *query.stride()[:3], *key.stride()[:3], *index.stride(), *strides,
            GROUP=group, CAUSAL=causal and kind <= _OF_KEYS, MASK=kind, SOFTCAP=softcap is not None,
            PRECISION=_precision(query), BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys, BLOCK_WIDTH=_block_width(width),
            num_warps=4,
        )  # fmt: skip
        tile = 64
        _row_weights_kernel[(triton.cdiv(keys, tile) * rows * batch,)](
            logits, tops, sums, out, count, rows, keys, blocks, HEADS=_HEADS[heads],
            BLOCK_HEADS=min(32, triton.next_power_of_2(count)), BLOCK_PARTS=min(64, triton.next_power_of_2(blocks)),
            BLOCK_KEYS=tile, num_warps=4,
        )  # fmt: skip
    return out


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
    """See `tokenprune.kernels.attention.attention_column_means`. block: rows and columns of the map at a time."""
    check_starts(query, key, mask, starts)
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    sums = torch.empty(batch, heads, queries, device=query.device)
    out = torch.empty_like(sums)
    if not out.numel():
        return out
    query, key = _rows_contiguous(query), _rows_contiguous(key)
    mask, kind, strides, lowest = _mask_arguments(mask, query, key)
    scaling, cap = _scales(scaling, softcap)
    begins = ends = query  # not read
    if starts is not None:
        token = torch.arange(keys, device=query.device)
        number = torch.searchsorted(starts.to(query.device, torch.long), token, right=True)
        begins, ends = starts.to(query.device)[number - 1], starts.to(query.device)[number]
    checked = valid if valid is not None else query
    wide = _block_width(width)
    # What fits in shared memory twice over; the longer side is the one that stays while the other is streamed.
    long, short = block or ((128, 64) if wide * query.element_size() <= 512 else (64, 32))
    common = dict(
        GROUP=heads // key.shape[1], CAUSAL=causal and kind <= _OF_KEYS, MASK=kind, SOFTCAP=softcap is not None,
        PRECISION=_precision(query), PACKED=starts is not None, BLOCK_WIDTH=wide, num_warps=8 if long > 64 else 4,
        num_stages=3 if query.element_size() == 2 else 2,
    )  # fmt: skip
    lengths = heads, queries, keys, width, scaling, cap, lowest, *query.stride()[:3], *key.stride()[:3]
    with torch.cuda.device_of(query):
        _row_sums_kernel[(triton.cdiv(queries, long) * heads * batch,)](
            query, key, _bytes(checked), mask, begins, ends, sums, *lengths, *checked.stride()[:2], *strides,
            VALID=valid is not None, BLOCK_ROWS=long, BLOCK_KEYS=short, **common,
        )  # fmt: skip
        _column_means_kernel[(triton.cdiv(queries, long) * heads * batch,)](
            query, key, mask, begins, ends, sums, out, *lengths, *strides,
            BLOCK_ROWS=short, BLOCK_KEYS=long, **common,
        )  # fmt: skip
    return out


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _mask_arguments(mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, int, tuple[int, ...], float]:
    """What the kernels need of a mask: memory, kind, strides over `[B, H, Q, K]`, and what hides a key in a bias."""
    if mask is None:
        return query, _NO_MASK, (0, 0, 0, 0), 0.0
    (batch, heads, queries), keys = query.shape[:3], key.shape[2]
    if mask.ndim == 2:
        mask = mask[:, -keys:].expand(batch, keys)
        return _bytes(mask), _OF_KEYS, (mask.stride(0), 0, 0, mask.stride(1)), 0.0
    mask = mask[..., :keys].expand(batch, heads, queries, keys)
    if mask.is_floating_point():
        return mask, _BIAS, mask.stride(), lowest_bias(mask.dtype)
    return _bytes(mask), _BOOL, mask.stride(), 0.0


def _scales(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Factors of a logit before and behind the softcap, to base 2."""
    return (scaling * _LOG2E, 0.0) if softcap is None else (scaling / softcap, softcap * _LOG2E)


def _precision(query: Tensor) -> str:
    # Products of float16 and bfloat16 are exact in float32 anyway; only float32 would be rounded before them. Triton's
    # interpreter multiplies the bits of bfloat16 as if they were integers.
    return "ieee" if query.dtype == torch.float32 or not query.is_cuda else "tf32"


def _block_width(width: int) -> int:
    return max(16, triton.next_power_of_2(width))
