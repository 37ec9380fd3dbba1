# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the Triton attention kernels: dot products, masking, and preparation of the arguments.

Logits are in base 2, so that the exponential is a single instruction.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenprune.kernels.attention import lowest_bias

_LOG2E = math.log2(math.e)
# Not specialized: lengths change with every prompt, and would cause recompilation.
LENGTHS = ["heads", "group", "rows", "keys", "queries", "blocks", "index_b", "index_r", "valid_b", "valid_q", "mask_b"]
_NO_MASK, KEY_MASK, _BOOL, _BIAS = range(4)


@triton.jit
def dot_products(a, b, real_a, real_b, width, PRECISION: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Return float32 `[M, N]` dot products of the vectors at addresses a `[M, 1]` and b `[1, N]`.

    The loop reads BLOCK_WIDTH features at a time. Vectors outside `real_a` and `real_b` count as zeros.
    """
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        wide = start + tl.arange(0, BLOCK_WIDTH)
        x = tl.load(a + wide[None, :], mask=real_a & (wide < width)[None, :], other=0.0)
        y = tl.load(b + wide[:, None], mask=real_b & (wide < width)[:, None], other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    return total


@triton.jit
def scale_logits(x, scaling, softcap, SOFTCAP: tl.constexpr):
    """Convert dot products to base-2 logits. `split_scaling` computes the two factors."""
    x = x * scaling
    if SOFTCAP:
        x = softcap * (2 * tl.sigmoid(2 * x) - 1)  # tanh
    return x


@triton.jit
def apply_mask(
    x, mask, batch, head, row, column, queries, keys, mask_b, mask_h, mask_q, mask_k, lowest,
    CAUSAL: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Return the masked logits of a block (-inf for hidden keys), and the visibility mask.

    `row` and `column` broadcast to the block. MASK: 0 no mask, 1 key padding, 2 bool with four axes, 3 additive.
    """
    visible = (row < queries) & (column < keys)
    if CAUSAL:
        visible = visible & (column <= row + (keys - queries))
    pointer = mask + batch * mask_b + column * mask_k
    if MASK == 1:
        visible = visible & (tl.load(pointer, mask=column < keys, other=0) != 0)
    if MASK >= 2:
        value = tl.load(pointer + head * mask_h + row * mask_q, mask=visible, other=0)
        if MASK == 2:
            visible = visible & (value != 0)
        else:
            value = value.to(tl.float32)
            visible = visible & (value > lowest)
            x += tl.where(visible, value, 0.0) * 1.4426950408889634  # log2(e)
    return tl.where(visible, x, float("-inf")), visible


@triton.jit
def replace_neg_inf(top):
    """Return `top` with -inf (the maximum of an empty row) replaced by 0, so that it can be subtracted."""
    return tl.where(top == float("-inf"), 0.0, top)


def make_rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def view_as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def get_mask_arguments(mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, int, tuple[int, ...], float]:
    """Return the kernel arguments of a mask.

    Returns:
        Memory, kind, strides over `[B, H, Q, K]`, and the bias that hides a key.
    """
    if mask is None:
        return query, _NO_MASK, (0, 0, 0, 0), 0.0
    (batch, heads, queries), keys = query.shape[:3], key.shape[2]
    if mask.ndim == 2:
        mask = mask[:, -keys:].expand(batch, keys)
        return view_as_bytes(mask), KEY_MASK, (mask.stride(0), 0, 0, mask.stride(1)), 0.0
    mask = mask[..., :keys].expand(batch, heads, queries, keys)
    if mask.is_floating_point():
        return mask, _BIAS, mask.stride(), lowest_bias(mask.dtype)
    return view_as_bytes(mask), _BOOL, mask.stride(), 0.0


def split_scaling(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Return the base-2 factors of a logit before and after the softcap."""
    return (scaling * _LOG2E, 0.0) if softcap is None else (scaling / softcap, softcap * _LOG2E)
