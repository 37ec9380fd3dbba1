# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks with one dense mask of all pairs: the reference of tokenprune/kernels/block_attention.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tokenprune.integrations.hf.attention import blockwise as block_attention
from tokenprune.kernels.block_attention import PADDING, SINK, TAIL, Parts


@contextmanager
def dense_mask() -> Iterator[None]:
    """Within this context, patched models attend with one dense mask instead of block by block."""

    def attend(query: Tensor, key: Tensor, value: Tensor, parts: Parts, scale: float, dropout: float = 0.0) -> Tensor:
        return attend_by_mask(query, key, value, ids_from(parts).expand(len(query), -1), scale, dropout)

    with patch.object(block_attention, "attend_in_blocks", attend):
        yield


def ids_from(parts: Parts) -> Tensor:
    runs = [(PADDING, parts.before), (SINK, parts.sink), *((n + 1, size) for n, size in enumerate(parts.blocks))]
    runs += [(TAIL, parts.tail), (PADDING, parts.after)]
    return torch.tensor([block_id for block_id, count in runs for _ in range(count)])


def attend_by_mask(
    query: Tensor, key: Tensor, value: Tensor, ids: Tensor, scale: float, dropout: float = 0.0
) -> Tensor:
    """Compute the output of `attend_in_blocks` for rows with any ids, shape (batch, length), in O(L^2) memory."""
    allowed = allowed_pairs(ids.to(query.device))
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=allowed[:, None],
        dropout_p=dropout,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.masked_fill((ids == PADDING).to(query.device)[:, None, :, None], 0)


def allowed_pairs(ids: Tensor) -> Tensor:
    """Return a bool mask (batch, query, key) of allowed pairs. Padding attends to itself, so that no row is empty."""
    queries, keys = ids[:, :, None], ids[:, None, :]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()
    allowed = (keys == SINK) | (keys == queries) | ((queries == TAIL) & (keys != PADDING))
    return causal & allowed & (keys != PADDING) | torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
