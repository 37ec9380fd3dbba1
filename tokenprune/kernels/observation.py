# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of one attention call, and the values that observables compute from them, in any engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.kernels.attention import attention_column_means, attention_rows, visible_keys

# Gathers the heads (axis 1) of all tensor-parallel processes.
Join = Callable[[Tensor], Tensor]


@dataclass
class Observation:
    """Queries and keys of one attention call, after rotary embedding and cache update.

    Methods return values of all heads, also if each process computes some of them.

    Args:
        query: `[B, H, Q, Dh]`.
        key: `[B, Hkv, K, Dh]`.
        mask: Mask as passed to the attention function.
        scaling: Factor of the logits.
        softcap: Softcap of the logits, if any.
        causal: Whether attention without a mask is causal.
        starts: Boundaries of packed sequences, int `[n + 1]`, if several share one axis.
        join: Gathers the heads of all processes, if each process has some of them.
        value: `[B, Hkv, K, Dv]`, if values were recorded.
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
        """Return the keys of the last `queries` tokens with flattened heads, `[B, Q, Hkv * Dh]`."""
        return self._join_heads(self.key[:, :, -queries:]).transpose(1, 2).flatten(2)

    def values(self, queries: int) -> Tensor:
        """Return the values of the last `queries` tokens with flattened heads, `[B, Q, Hkv * Dv]`."""
        return self.value_heads(queries).flatten(2)

    def query_heads(self, queries: int) -> Tensor:
        """Return the last `queries` queries, `[B, Q, H, Dh]`, without a copy."""
        return self._join_heads(self.query[:, :, -queries:]).transpose(1, 2)

    def value_heads(self, queries: int) -> Tensor:
        """Return the values of the last `queries` tokens, `[B, Q, Hkv, Dv]`, without a copy."""
        if self.value is None:
            raise TokenPruneError("The values of this attention call were not recorded.")
        return self._join_heads(self.value[:, :, -queries:]).transpose(1, 2)

    def first_keys(self, count: int) -> Observation:
        """Return this observation limited to its first `count` keys."""
        value = None if self.value is None else self.value[:, :, :count]
        mask = None if self.mask is None else self.mask[..., :count]
        return replace(self, key=self.key[:, :, :count], value=value, mask=mask)

    @torch.no_grad()
    def rows(self, index: Tensor) -> Tensor:
        """Return softmax attention of some queries, float32 `[B, H, R, K]`, without gradients.

        Queries without visible keys have zeros.

        Args:
            index: Queries to compute, long `[B, R]`, as indices into this call.
        """
        return self._join_heads(attention_rows(self.query, self.key, index, self.mask, **self._options))

    def visible_keys(self, index: Tensor) -> Tensor:
        """Return the keys that the queries at `index` (long `[B, R]`) see, bool `[B, 1 or H, R, K]`."""
        return visible_keys(self.query, self.key, index, self.mask, causal=self.causal)

    @torch.no_grad()
    def column_means(self, valid: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Return the mean attention that each query's token receives, float32 `[B, H, Q]`, without gradients.

        Args:
            valid: Queries to average over, bool `[B, Q]`. None averages over all.
            starts: Boundaries of packed sequences.
        """
        partial = attention_column_means(self.query, self.key, valid, self.mask, starts, **self._options)
        return self._join_heads(partial)

    def _join_heads(self, partial: Tensor) -> Tensor:
        return partial if self.join is None else self.join(partial)

    @property
    def _options(self) -> dict[str, Any]:
        return dict(scaling=self.scaling, causal=self.causal, softcap=self.softcap)
