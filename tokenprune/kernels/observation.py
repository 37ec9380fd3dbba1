# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of one call of an attention function, and values computed of them, in any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.kernels.attention import attention_column_means, attention_rows, visible_keys

# Joins the heads (axis 1) of all processes that share a module.
Join = Callable[[Tensor], Tensor]


@dataclass
class Observation:
    """Queries and keys of one attention call, after rotary embedding and cache update.

    query: `[B, H, Q, Dh]`; key: `[B, Hkv, K, Dh]`; value: `[B, Hkv, K, Dv]`, if it was read; mask: as handed to the
    attention function; scaling: factor before softmax; causal: the meaning of no mask; starts: borders of packed
    sequences, if several share one axis; join: brings the heads of all processes together, if this one has a part of
    them. The methods return values of all heads.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None = None
    causal: bool = True
    starts: Tensor | None = None
    join: Join | None = None
    value: Tensor | None = None

    def keys(self, queries: int) -> Tensor:
        """`[B, Q, Hkv * Dh]`: keys of the last `queries` tokens, heads flattened."""
        return self._of_all(self.key[:, :, -queries:]).transpose(1, 2).flatten(2)

    def values(self, queries: int) -> Tensor:
        """`[B, Q, Hkv * Dv]`: values of the last `queries` tokens, heads flattened."""
        return self.value_heads(queries).flatten(2)

    def query_heads(self, queries: int) -> Tensor:
        """`[B, Q, H, Dh]`: the last `queries` queries, no copy."""
        return self._of_all(self.query[:, :, -queries:]).transpose(1, 2)

    def value_heads(self, queries: int) -> Tensor:
        """`[B, Q, Hkv, Dv]`: values of the last `queries` tokens, no copy."""
        if self.value is None:
            raise TokenPruneError("the values of this attention were not read")
        return self._of_all(self.value[:, :, -queries:]).transpose(1, 2)

    def first_keys(self, count: int) -> Observation:
        """Return what this call saw of its first `count` keys."""
        value = None if self.value is None else self.value[:, :, :count]
        mask = None if self.mask is None else self.mask[..., :count]
        return replace(self, key=self.key[:, :, :count], value=value, mask=mask)

    @torch.no_grad()
    def rows(self, index: Tensor) -> Tensor:
        """float32 `[B, H, R, K]`: softmax attention of the queries at `index` (long `[B, R]`, in this call's slots),
        without gradient; 0 for queries that see nothing."""
        return self._of_all(attention_rows(self.query, self.key, index, self.mask, **self._options))

    def visible_keys(self, index: Tensor) -> Tensor:
        """bool `[B, 1 or H, R, K]`: which keys the queries at `index` (long `[B, R]`) may attend to."""
        return visible_keys(self.query, self.key, index, self.mask, causal=self.causal)

    @torch.no_grad()
    def column_means(self, valid: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """float32 `[B, H, Q]`: mean attention that each of this call's tokens receives from the tokens that see it,
        without gradient.

        valid: bool `[B, Q]`, False for padding queries. starts: where the sequences that share the axis begin and end.
        """
        own = attention_column_means(self.query, self.key, valid, self.mask, starts, **self._options)
        return self._of_all(own)

    def _of_all(self, own: Tensor) -> Tensor:
        return own if self.join is None else self.join(own)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(scaling=self.scaling, causal=self.causal, softcap=self.softcap)
