# SPDX-License-Identifier: Apache-2.0
"""Rows and column means of an attention map, computed from queries and keys without the full map.

Shared arguments of the functions in this module:
    query: `[B, H, Q, D]`, after rotary embedding.
    key: `[B, Hkv, K, D]`, after rotary embedding. H is a multiple of Hkv (grouped heads). The last Q keys belong to the
        queries, and the keys before them to the past.
    mask: Visible keys of each query. One of: bool `[B or 1, H or 1, Q or 1, >= K]` (True is visible); an additive float
        mask of the same shape, where values of at most half of the dtype's minimum hide a key; or `[B, >= K]`, bool or
        int, which is False or 0 at padding keys.
    causal: Whether queries are limited to earlier keys. Ignored if the mask has four axes.
    scaling, softcap: A logit is `scaling * q @ k`, or `softcap * tanh(scaling * q @ k / softcap)`.

A query without visible keys has a row of zeros. The kernels agree with the references within float32 rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenprune.errors import OptionError
from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.host_checks import reads_fast

HEADS = (None, "mean", "max", "sum")
_MAX_ELEMENTS = 2**22  # elements of the attention map that the column mean reference holds at once
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _limits(
    query: Tensor, key: Tensor, index: Tensor | None = None, mask: Tensor | None = None, **options: object
) -> str | None:
    if query.dtype != key.dtype or query.dtype not in _DTYPES:
        return f"queries are {query.dtype} and keys {key.dtype}, but both must be float32, float16 or bfloat16"
    if query.shape[-1] > 256:
        return f"the head dimension {query.shape[-1]} exceeds 256"
    if mask is not None and mask.is_floating_point() and mask.dtype not in _DTYPES:
        return f"masks of dtype {mask.dtype} are not supported"
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
    """Compute the softmax attention of some queries.

    See the module docstring for the shared arguments.

    Args:
        index: Queries to compute, long `[B, R]`, in [0, Q).
        heads: "mean", "max" or "sum" reduces the heads. None keeps them.

    Returns:
        float32 `[B, H, R, K]`, or `[B, R, K]` with reduced heads.

    Raises:
        OptionError: If `heads` is unknown.
    """
    check_heads(heads)
    weights, visible, hidden = _compute_weights(query, key, index, mask, scaling, causal, softcap)
    if hidden.rows:
        weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)
    if heads is None:
        return weights
    return weights.amax(1) if heads == "max" else getattr(weights, heads)(1)


def _describe_column_limits(
    query: Tensor,
    key: Tensor,
    valid: Tensor | None = None,
    mask: Tensor | None = None,
    *rest: object,
    **options: object,
) -> str | None:
    return _limits(query, key, valid, mask, **options)


@operation(kernel="tokenprune.kernels.attention_columns_triton:attention_column_means", limits=_describe_column_limits)
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
    """Compute the mean attention that each query's token receives from the valid queries that see it.

    See the module docstring for the shared arguments. Memory is O(Q + K), not O(Q K).

    Args:
        valid: Queries to average over, bool `[B, Q]`, False at padding. None averages over all.
        starts: Boundaries of n packed sequences on the token axis, int `[n + 1]`. Tokens attend within their own
            sequence. Requires B = 1, Q = K and no mask.

    Returns:
        float32 `[B, H, Q]`, 0 for tokens that no valid query sees.

    Raises:
        OptionError: If `starts` is combined with a mask, several rows or past keys.
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
    for index in slots.split(max(1, _MAX_ELEMENTS // max(1, batch * heads * key.shape[2]))):
        index = index.expand(batch, -1)
        weights, visible, _ = _compute_weights(query, key, index, mask, **options)
        visible = (visible & valid.gather(1, index)[:, None, :, None])[..., -queries:]
        # The product removes invalid rows, and the uniform softmax of rows without visible keys.
        total += weights[..., -queries:].mul_(visible.float()).sum(2)
        count += visible.sum(2)
    return total / count.clamp(min=1)


def visible_keys(
    query: Tensor, key: Tensor, index: Tensor, mask: Tensor | None = None, *, causal: bool = True
) -> Tensor:
    """Return the keys that the queries at `index` (long `[B, R]`) see, bool `[B, 1 or H, R, K]`."""
    if mask is not None and mask.ndim == 4:
        rows = _mask_rows(query, key, index, mask)
        return rows if rows.dtype == torch.bool else rows > lowest_bias(rows.dtype)
    # Flash attention passes a 2-D mask of padding keys, or none.
    queries, keys = query.shape[2], key.shape[2]
    if causal:
        last = index if keys == queries else index + (keys - queries)
        visible = torch.arange(keys, device=index.device) <= last.view(len(index), 1, index.shape[1], 1)
    else:
        visible = torch.ones(len(index), 1, index.shape[1], keys, dtype=torch.bool, device=index.device)
    return visible if mask is None else visible & mask[:, None, None, -keys:].bool()


def lowest_bias(dtype: torch.dtype) -> float:
    """Return the additive mask value at or below which a key is hidden."""
    return torch.finfo(dtype).min / 2


def check_heads(heads: str | None) -> None:
    """Raise OptionError if `heads` is not a known reduction."""
    if heads not in HEADS:
        raise OptionError(f"heads={heads!r} is not supported. Pass None, 'mean', 'max' or 'sum'.")


def check_starts(query: Tensor, key: Tensor, mask: Tensor | None, starts: Tensor | None) -> None:
    """Raise OptionError if `starts` is combined with arguments that packed sequences do not support."""
    if starts is not None and (mask is not None or query.shape[0] != 1 or query.shape[2] != key.shape[2]):
        raise OptionError("starts= describes packed sequences. Pass one row, as many keys as queries, and no mask.")


class HiddenKeys(NamedTuple):
    """The passes that hidden keys require. A device is not read, so each pass is required there.

    Attributes:
        keys: Whether a key is hidden from all rows.
        queries: Whether a query sees no key in any head.
        rows: Whether a row of a head sees no key.
        bias: 0 at visible keys and `lowest` at hidden keys, float32 `[B, 1 or H, R, K]`. None if no key is hidden.
    """

    keys: bool
    queries: bool
    rows: bool
    bias: Tensor | None


def _describe_hidden(visible: Tensor, lowest: float) -> HiddenKeys:
    if reads_fast(visible):
        from tokenprune.kernels import host_loops

        return HiddenKeys(*host_loops.describe_hidden(visible, lowest))
    bias = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device).masked_fill_(~visible, lowest)
    return HiddenKeys(True, True, True, bias)


def _compute_weights(
    query: Tensor,
    key: Tensor,
    index: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor, HiddenKeys]:
    """Return softmax rows, float32 `[B, H, R, K]`, and `visible_keys`. Rows without visible keys are not zeroed."""
    batch, heads, _, width = query.shape
    kv_heads, keys = key.shape[1:3]
    count, lowest = index.shape[1], torch.finfo(torch.float32).min
    visible = visible_keys(query, key, index, mask, causal=causal)
    hidden = _describe_hidden(visible, lowest)
    # Padding may contain NaN. Biases are added to scores and invalid rows are multiplied by 0, so NaN would spread:
    # replace keys that no row sees, and queries that see no key, by zeros.
    if hidden.keys:
        key = key.masked_fill(~visible.any(2, keepdim=True).any(1, keepdim=True).transpose(2, 3), 0)
    if batch == 1:  # an order of magnitude faster than `gather`
        query_rows = query.index_select(2, index[0]).float()
    else:
        query_rows = query.gather(2, index[:, None, :, None].expand(batch, heads, count, width)).float()
    if hidden.queries:
        query_rows = query_rows.masked_fill(~visible.any(3, keepdim=True).any(1, keepdim=True), 0)
    # Grouped heads share a key head: fold the group into the rows instead of repeating the keys.
    query_rows = query_rows.reshape(batch * kv_heads, heads // kv_heads * count, width)
    # The memory layout of the keys decides how a product is rounded.
    key_columns = key.float().contiguous().flatten(0, 1).transpose(1, 2)
    scores = torch.bmm(query_rows, key_columns).mul_(scaling).view(batch, heads, count, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.ndim == 4 and mask.is_floating_point():
        scores = scores + _mask_rows(query, key, index, mask).float()
    # Adding one bias to all heads is ten times as fast as masked_fill on each head, with the same result.
    if hidden.bias is not None:
        scores.add_(hidden.bias)
    if mask is not None and mask.is_floating_point():
        scores.clamp_(min=lowest)  # a row of -inf would have a NaN softmax
    return scores.softmax(dim=-1), visible, hidden


def _mask_rows(query: Tensor, key: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Return the rows of a 4-D mask at `index`, `[B, 1 or H, R, K]`."""
    heads, keys = mask.shape[1], key.shape[2]
    mask = mask[..., :keys].expand(query.shape[0], heads, query.shape[2], keys)
    return mask.gather(2, index[:, None, :, None].expand(-1, heads, -1, keys))
