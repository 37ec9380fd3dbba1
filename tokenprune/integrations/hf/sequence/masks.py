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
from tokenprune.per_layer import per_layer


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
    if rows is not None:
        mask = mask.gather(2, rows.to(mask.device)[:, None, :, None].expand(batch, heads, -1, mask.shape[3]))
    mask = mask.gather(3, columns[:, None, None, :].expand(batch, heads, mask.shape[2], -1))
    blocked = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return mask.masked_fill(empty[:, None, None, :], blocked)


def gather_token_mask(mask: Tensor | None, rows: Tensor, valid: Tensor | None) -> Tensor | None:
    """Return the mask of the tokens that remain, bool or int `[B, Q']`, where it tells of tokens alone (None = all).

    mask: the same before, `[B, Q]`. rows: long `[B, Q']`, which tokens remain. valid: bool `[B, Q']`, which of these
    are no empty slots (None = all).
    """
    if mask is None:
        return valid
    mask = mask.gather(1, rows.to(mask.device))
    return mask if valid is None else mask.masked_fill(~valid.to(mask.device), 0)


def causal_mask(valid: Tensor, queries: int, attention: str, dtype: torch.dtype) -> Tensor:
    """Return a causal mask over slots for the last `queries` of them, for where transformers gave none.

    valid: bool `[B, K]`. attention: name of the attention implementation; it decides the form (see `gather_mask`).
    """
    if "flash" in attention:
        return valid
    keys = valid.shape[1]
    slots = torch.arange(keys, device=valid.device)
    allowed = slots[None, :] <= slots[keys - queries :, None]
    allowed = allowed[None, None] & valid[:, None, None, :]
    if attention == "sdpa":
        return allowed
    if attention == "eager":
        return torch.zeros((), dtype=dtype, device=valid.device).masked_fill(~allowed, torch.finfo(dtype).min)
    raise UnsupportedSetupError(
        f"attn_implementation={attention!r} cannot be used with rows that keep different numbers of tokens; load the "
        'model with "sdpa", "eager" or "flash_attention_2"'
    )


def sliding_layers(config: Any) -> list[int]:
    """Return the decoder layers that attend in a window: a sliding one, or chunks."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds) if "sliding" in kind or "chunked" in kind]
    return [layer for layer, window in enumerate(per_layer(config, "sliding_window")) if window is not None]
