# SPDX-License-Identifier: Apache-2.0
"""Closed-form prefill FLOPs and KV bytes of a decoder, from its config and the tokens that each layer sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def _mean(sizes: Any) -> int:
    """A size that is given for each layer, as one number."""
    return round(sum(sizes) / len(sizes)) if isinstance(sizes, (list, tuple)) else sizes


@dataclass(frozen=True)
class DecoderShape:
    """The sizes that the closed forms need; `from_config` reads them from a Hugging Face text config."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def from_config(cls, config: Any) -> DecoderShape:
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=_mean(getattr(config, "intermediate_size", None)) or 4 * config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )

    def layer_flops(self, tokens: float, attention: float = 1.0) -> float:
        """Multiply-adds x 2 of one layer in prefill: projections, gated MLP, and attention over the full square (as
        papers count it, causal masking not deducted). Norms, rotary embedding and softmax are left out.

        attention: share of causal attention's pairs of query and key that are computed."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linear = 2 * tokens * self.hidden * (2 * query + 2 * kv + 3 * self.intermediate)
        return linear + 4 * tokens * tokens * query * attention

    def prefill_flops(self, tokens_per_layer: list[float], attention_per_layer: list[float] | None = None) -> float:
        """Sum of `layer_flops` over the layers; the vision tower and the output head are not in it."""
        attention = attention_per_layer or [1.0] * len(tokens_per_layer)
        return sum(self.layer_flops(*layer) for layer in zip(tokens_per_layer, attention, strict=True))

    def kv_bytes(self, tokens_per_layer: list[int], bytes_per_number: int) -> int:
        """Bytes of keys and values over all layers."""
        return 2 * self.kv_heads * self.head_dim * bytes_per_number * sum(tokens_per_layer)
