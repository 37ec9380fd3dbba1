# SPDX-License-Identifier: Apache-2.0
"""Attention masks for a sequence from which tokens were removed.

transformers builds masks for the caller's full ("logical") sequence, because a reduced cache reports its logical length
(reduced_cache.py). Each decoder layer then needs the rows and columns of the tokens that this very layer still holds.
Causality, padding, sliding windows and image-wide attention all survive such a gather exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.models.per_layer import get_layer_values

_ROWS = 512  # of a mask that are gathered at once


def gather_mask(mask: Tensor, rows: Tensor | None, columns: Tensor) -> Tensor:
    """Return the mask of the tokens that remain.

    mask: 2-D bool or int `[B, K]` (flash) or 4-D `[B or 1, 1 or H, Q, K]`, bool (True = may attend) or additive float.
    rows: long `[B, Q']`, which queries remain (None = all). columns: long `[B, K']`, which keys remain, -1 = an empty
    slot, which is masked.
    """
    if not isinstance(mask, Tensor):
        raise UnsupportedSetupError(
            f"attention masks of type {type(mask).__name__} (flex attention) cannot be cut; load the model with "
            'attn_implementation="sdpa", "eager" or "flash_attention_2"'
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

    def remaining(block: Tensor) -> Tensor:
        found = block.gather(3, columns[:, None, None, :].expand(batch, heads, block.shape[2], -1))
        return found.masked_fill_(empty[:, None, None, :], blocked)

    if rows is None:
        return remaining(mask)
    # By rows, so that nothing is made of all that remain beside all keys.
    rows, made = rows.to(mask.device), mask.new_empty(batch, heads, rows.shape[1], columns.shape[1])
    for start in range(0, rows.shape[1], _ROWS):
        some = rows[:, start : start + _ROWS]
        block = mask.gather(2, some[:, None, :, None].expand(batch, heads, -1, mask.shape[3]))
        made[:, :, start : start + _ROWS] = remaining(block)
    return made


def gather_token_mask(mask: Tensor | None, rows: Tensor, valid: Tensor | None) -> Tensor | None:
    """Return the mask of the tokens that remain, bool or int `[B, Q']`, where it tells of tokens alone (None = all).

    mask: the same before, `[B, Q]`. rows: long `[B, Q']`, which tokens remain. valid: bool `[B, Q']`, which of these
    are no empty slots (None = all).
    """
    if mask is None:
        return valid
    mask = mask.gather(1, rows.to(mask.device))
    return mask if valid is None else mask.masked_fill(~valid.to(mask.device), 0)


def causal_mask(queries: Tensor, keys: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    """Return a causal mask, for where transformers gave none.

    queries: long `[B, Q]`, keys: long `[B, K]`, their logical positions, -1 = an empty slot. attention: name of the
    attention implementation; it decides the form (see `gather_mask`).
    """
    queries = queries.to(keys.device)
    if "flash" in attention:
        return keys >= 0
    allowed = (keys[:, None] <= queries[..., None])[:, None]
    allowed &= (keys >= 0)[:, None, None]
    if attention == "sdpa":
        return allowed
    if attention == "eager":
        return additive(allowed, dtype)
    raise UnsupportedSetupError(
        f"attn_implementation={attention!r} cannot be used with rows that keep different numbers of tokens; load the "
        'model with "sdpa", "eager" or "flash_attention_2"'
    )


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask that eager attention takes: 0 where `allowed` (bool, any shape), else the least number there
    is."""
    return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def padding_of(made: Any, past: int, length: int) -> Tensor | None:
    """bool `[B, length]`, True at padding after `past` tokens (it may not attend to itself); None without a mask.

    made: the mask that `generate` makes ahead for a static cache, or those by kind of layer.
    """
    mask = made.get("full_attention") if isinstance(made, dict) else made
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2:
        return ~mask[:, -length:].bool()
    own = mask[:, 0, :, past : past + length].diagonal(dim1=1, dim2=2)
    return ~own if own.dtype == torch.bool else own < 0


def sliding_layers(config: Any) -> list[int]:
    """Return the decoder layers that attend in a window: a sliding one, or chunks."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds) if "sliding" in kind or "chunked" in kind]
    return [layer for layer, window in enumerate(get_layer_values(config, "sliding_window")) if window is not None]
