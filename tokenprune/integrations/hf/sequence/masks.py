# SPDX-License-Identifier: Apache-2.0
"""Attention masks of sequences with dropped tokens.

transformers builds masks for the full (logical) sequence, because a reduced cache reports its logical length. Each
layer needs the rows and columns of the tokens that it holds. Gathering them preserves causality, padding, sliding
windows and bidirectional attention within images exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.models.per_layer import get_layer_values

_ROWS = 512  # rows of a mask that are gathered together


def gather_mask(mask: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Gather rows and columns of a mask.

    Args:
        mask: Mask of shape (batch, keys), bool or int (flash attention), or of shape (batch or 1, 1 or heads, queries,
            keys), bool (True: visible) or additive float.
        rows: Indices of queries, shape (batch, new queries), int64, or None for all.
        columns: Indices of keys, shape (batch, new keys), int64, -1 for empty slots, which are masked.
    """
    if not isinstance(mask, Tensor):
        raise UnsupportedSetupError(
            f"Attention masks of type {type(mask).__name__} (flex attention) are not supported. Load the model with "
            'attn_implementation="sdpa", "eager" or "flash_attention_2".'
        )
    columns = columns.to(mask.device)
    empty = columns < 0
    columns = columns.clamp(min=0)
    if mask.ndim == 2:
        return mask.gather(1, columns).masked_fill(empty, 0)
    batch = columns.shape[0]
    if mask.shape[0] != batch:
        mask = mask.expand(batch, *mask.shape[1:])
    heads = mask.shape[1]
    blocked = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min

    def gather_columns(block: Tensor) -> Tensor:
        gathered = block.gather(3, columns[:, None, None, :].expand(batch, heads, block.shape[2], -1))
        return gathered.masked_fill_(empty[:, None, None, :], blocked)

    if rows is None:
        return gather_columns(mask)
    # Rows are gathered in blocks, to avoid a temporary mask of the new queries and all keys.
    rows, result = rows.to(mask.device), mask.new_empty(batch, heads, rows.shape[1], columns.shape[1])
    for start in range(0, rows.shape[1], _ROWS):
        block_rows = rows[:, start : start + _ROWS]
        block = mask.gather(2, block_rows[:, None, :, None].expand(batch, heads, -1, mask.shape[3]))
        result[:, :, start : start + _ROWS] = gather_columns(block)
    return result


def build_causal_mask(queries: Tensor, keys: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    """Build a causal mask, for layers to which transformers passes no mask.

    Args:
        queries: Logical positions, shape (batch, queries), int64, -1 for empty slots.
        keys: Logical positions, shape (batch, keys), int64, -1 for empty slots.
        attention: Name of the attention implementation. It determines the form, see `gather_mask`.
        dtype: Dtype of an additive mask.
    """
    queries = queries.to(keys.device)
    if "flash" in attention:
        return keys >= 0
    allowed = (keys[:, None] <= queries[..., None])[:, None]
    allowed &= (keys >= 0)[:, None, None]
    if attention == "sdpa":
        return allowed
    if attention == "eager":
        return to_additive(allowed, dtype)
    raise UnsupportedSetupError(
        f"attn_implementation={attention!r} is not supported for rows that keep different numbers of tokens. Load the "
        'model with "sdpa", "eager" or "flash_attention_2".'
    )


def to_additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to the additive mask of eager attention: 0 where True, else the minimum of `dtype`."""
    return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def read_padding(prepared: Any, past: int, length: int) -> Tensor | None:
    """Read the padding mask from masks that `generate` prepares for a static cache.

    In a 4-D mask, a token that does not attend to itself is padding.

    Args:
        prepared: A mask, or a dictionary of masks by kind of layer.
        past: Number of tokens in the cache.
        length: Number of tokens of the call.

    Returns:
        True at padding, shape (batch, length), bool, or None without a mask.
    """
    mask = prepared.get("full_attention") if isinstance(prepared, dict) else prepared
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        return ~mask[:, -length:].bool()
    diagonal = mask[:, 0, :, past : past + length].diagonal(dim1=1, dim2=2)
    return ~diagonal if diagonal.dtype == torch.bool else diagonal < 0


def find_sliding_layers(config: Any) -> list[int]:
    """Return the decoder layers with a sliding window or chunked attention."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds) if "sliding" in kind or "chunked" in kind]
    return [layer for layer, window in enumerate(get_layer_values(config, "sliding_window")) if window is not None]
