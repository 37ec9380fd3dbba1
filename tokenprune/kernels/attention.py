# SPDX-License-Identifier: Apache-2.0
"""Parts of an attention map, made from queries and keys without the map: rows, and means of its columns.

query: `[B, H, Q, D]`; key: `[B, Hkv, K, D]`, H a multiple of Hkv (grouped heads); both after rotary embedding. The last
Q keys belong to the queries, what is before them to the past. A logit is `scaling * q @ k`, with a softcap
`softcap * tanh(logit / softcap)`.

mask says who sees whom: bool `[B or 1, H or 1, Q or 1, >= K]` (True = sees), additive float of that shape (a key that
gets half of the dtype's lowest number or less is not seen), or `[B, >= K]` of bool or int: keys that are no padding.
causal: whether queries see no later keys, where no mask of four axes says so. A query that sees no key has a row of
zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import OptionError
from tokenprune.kernels.dispatch import operation

HEADS = (None, "mean", "max", "sum")
_ELEMENTS = 2**22  # of the attention map that the reference of column means makes at a time
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _limits(
    query: Tensor, key: Tensor, index: Tensor | None = None, mask: Tensor | None = None, **options: object
) -> str | None:
    if query.dtype != key.dtype or query.dtype not in _DTYPES:
        return f"queries and keys are {query.dtype} and {key.dtype}, not both float32, float16 or bfloat16"
    if query.shape[-1] > 256:
        return f"heads are {query.shape[-1]} wide, more than 256"
    if mask is not None and mask.is_floating_point() and mask.dtype not in _DTYPES:
        return f"the mask is {mask.dtype}"
    return None


@operation(kernel="tokenprune.kernels.attention_rows_triton:attention_rows", limits=_limits)
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
) -> Tensor:
    """float32 `[B, H, R, K]`: softmax attention of the queries at `index`; see the module's text for the arguments.

    index: long `[B, R]`, in 0 .. Q-1. heads: "mean", "max" or "sum" reduces the heads, to `[B, R, K]`.
    Raises OptionError for another `heads`.
    """
    check_heads(heads)
    weights, seen = _weights(query, key, index, mask, scaling, causal, softcap)
    blind = ~seen.any(-1, keepdim=True)
    if blind.device.type != "cpu" or blind.any():  # the host may be asked, and is spared a pass over all rows
        weights = weights.masked_fill(blind, 0)
    if heads is None:
        return weights
    return weights.amax(1) if heads == "max" else getattr(weights, heads)(1)


def _column_limits(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    *rest: object,
    **options: object,
) -> str | None:
    return _limits(query, key, valid, mask, **options)


@operation(kernel="tokenprune.kernels.attention_columns_triton:attention_column_means", limits=_column_limits)
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
) -> Tensor:
    """float32 `[B, H, Q]`: mean attention that each query's token receives from those that see it, 0 if none does.

    valid: bool `[B, Q]`, False for queries that do not count (padding); None = all do. starts: int `[n + 1]`, where the
    n sequences begin and end that lie end to end on the token axis (then B = 1, Q = K, no mask): tokens see their own
    sequence only. Memory is O(Q + K), not O(Q K).
    Raises OptionError for `starts` beside what it does not go with.
    """
    check_starts(query, key, mask, starts)
    batch, heads, queries = query.shape[:3]
    if valid is None:
        valid = torch.ones(batch, queries, dtype=torch.bool, device=query.device)
    options: dict[str, Any] = dict(scaling=scaling, causal=causal, softcap=softcap)
    if starts is not None:
        lengths = starts.diff().tolist()
        pieces = zip(query.split(lengths, 2), key.split(lengths, 2), valid.split(lengths, 1), strict=True)
        return torch.cat([attention_column_means.reference(*piece, **options) for piece in pieces], dim=2)
    query = query.masked_fill(~valid[:, None, :, None], 0)
    total = torch.zeros(batch, heads, queries, dtype=torch.float32, device=query.device)
    count = torch.zeros(
        batch, 1 if mask is None or mask.ndim == 2 else mask.shape[1], queries, dtype=torch.float32, device=query.device
    )
    slots = torch.arange(queries, device=query.device)
    for index in slots.split(max(1, _ELEMENTS // max(1, batch * heads * key.shape[2]))):
        index = index.expand(batch, -1)
        weights, seen = _weights(query, key, index, mask, **options)
        seen = (seen & valid.gather(1, index)[:, None, :, None])[..., -queries:]
        # Besides the rows that do not count, this leaves out what the softmax makes of rows that see nothing.
        total += weights[..., -queries:].mul_(seen.float()).sum(2)
        count += seen.sum(2)
    return total / count.clamp(min=1)


def visible_keys(
    query: Tensor, key: Tensor, index: Tensor, mask: Tensor | None = None, *, causal: bool = True
) -> Tensor:
    """bool `[B, 1 or H, R, K]`: which keys the queries at `index` (long `[B, R]`) see."""
    if mask is not None and mask.ndim == 4:
        rows = _mask_rows(query, key, index, mask)
        return rows if rows.dtype == torch.bool else rows > lowest_bias(rows.dtype)
    # No mask: causal, or everything; a 2-D mask (flash): the same and padding.
    queries, keys = query.shape[2], key.shape[2]
    slots = torch.arange(keys, device=index.device)
    last = index + (keys - queries) if causal else torch.full_like(index, keys)
    seen = slots <= last[:, None, :, None]
    return seen if mask is None else seen & mask[:, None, None, -keys:].bool()


def lowest_bias(dtype: torch.dtype) -> float:
    """Return the value that an additive mask must exceed to leave a key visible."""
    return torch.finfo(dtype).min / 2


def check_heads(heads: str | None) -> None:
    if heads not in HEADS:
        raise OptionError(f"heads={heads!r} is not known: use None, 'mean', 'max' or 'sum'")


def check_starts(query: Tensor, key: Tensor, mask: Tensor | None, starts: Tensor | None) -> None:
    if starts is not None and (mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]):
        raise OptionError("starts= describes sequences on one axis: pass one row, as many keys as queries, and no mask")


def _weights(
    query: Tensor,
    key: Tensor,
    index: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Rows of the softmax, float32 `[B, H, R, K]`, and what `visible_keys` says; rows that see nothing are not 0."""
    batch, heads, _, width = query.shape
    kv_heads, keys = key.shape[1:3]
    count = index.shape[1]
    seen = visible_keys(query, key, index, mask, causal=causal)
    # What hides a key is added to its score and rows are left out by a factor of 0, so neither may be NaN, as padding
    # may be: 0 stands for keys that no row sees, and in rows that see none.
    key = key.masked_fill(~seen.any(2, keepdim=True).any(1, keepdim=True).transpose(2, 3), 0)
    query_rows = query.gather(2, index[:, None, :, None].expand(batch, heads, count, width)).float()
    query_rows = query_rows.masked_fill_(~seen.any(3, keepdim=True).any(1, keepdim=True), 0)
    # Grouped heads share a key head: fold the group into the rows instead of repeating the keys.
    query_rows = query_rows.reshape(batch, kv_heads, heads // kv_heads * count, width)
    scores = (query_rows @ key.float().transpose(2, 3)).mul_(scaling)
    scores = scores.view(batch, heads, count, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.ndim == 4 and mask.is_floating_point():
        scores = scores + _mask_rows(query, key, index, mask).float()
    # Added to all heads, which gives the same as filling each of them by the mask, ten times as fast.
    lowest = torch.finfo(scores.dtype).min
    scores.add_(torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, lowest))
    if mask is not None and mask.is_floating_point():
        scores.clamp_(min=lowest)  # not -inf: there would be no softmax of a row that sees nothing
    return scores.softmax(dim=-1), seen


def _mask_rows(query: Tensor, key: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """`[B, 1 or H, R, K]`: rows of a 4-D mask."""
    heads, keys = mask.shape[1], key.shape[2]
    mask = mask[..., :keys].expand(query.shape[0], heads, query.shape[2], keys)
    return mask.gather(2, index[:, None, :, None].expand(-1, heads, -1, keys))
