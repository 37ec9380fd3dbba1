# SPDX-License-Identifier: Apache-2.0
"""Closed-form prefill FLOPs and KV bytes of a decoder, from its config and the tokens that each layer sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.models.per_layer import count_mlp_matrices, find_keyless_layers, get_layer_values, merge_equal

# One number for all layers, or one for each.
Size = int | tuple[int, ...]
# How configs call the width of the MLP that do not say `intermediate_size`.
_WIDTHS = ("ffn_dim", "n_inner", "ffn_hidden_size")


def _at(size: Size, layer: int) -> int:
    return size[layer] if isinstance(size, tuple) else size


@dataclass(frozen=True)
class DecoderShape:
    """The sizes that the closed forms need; `from_config` reads them from a Hugging Face text config. Those of type
    `Size` are tuples where layers differ.

    layers, hidden: how many layers, and the width of what goes through them.
    intermediate: the width of each layer's MLP.
    heads, kv_heads, head_dim: of attention; `kv_heads` is 0 in a layer that attends to the keys of another.
    kv_projections: matrices that make keys and values, 1 where values are made of the keys' projection.
    mlp_matrices: matrices of an MLP, 3 where it is gated, 2 where it is not (OPT).
    """

    layers: int
    hidden: int
    intermediate: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    kv_projections: Size = 2
    mlp_matrices: int = 3

    @classmethod
    def from_config(cls, config: Any) -> DecoderShape:
        layers, hidden = range(config.num_hidden_layers), config.hidden_size
        keyless = find_keyless_layers(config)
        heads = get_layer_values(config, "num_attention_heads")
        kv_heads = get_layer_values(config, "num_key_value_heads")
        head_dim = get_layer_values(config, "head_dim")
        own_name = next((name for name in _WIDTHS if getattr(config, name, None)), None)  # of GPT's kin
        default = getattr(config, own_name) if own_name else 4 * hidden
        intermediate = [width or default for width in get_layer_values(config, "intermediate_size")]
        if getattr(config, "use_double_wide_mlp", False):  # Gemma 4, beside keys that are shared
            intermediate = [width * (2 if layer in keyless else 1) for layer, width in enumerate(intermediate)]
        kinds = get_layer_values(config, "layer_types")
        joined = getattr(config, "attention_k_eq_v", False)  # Gemma 4 again, where attention is no sliding window
        return cls(
            layers=len(layers),
            hidden=hidden,
            intermediate=merge_equal(intermediate),
            heads=merge_equal(heads),
            kv_heads=merge_equal([0 if layer in keyless else kv_heads[layer] or heads[layer] for layer in layers]),
            head_dim=merge_equal([head_dim[layer] or hidden // heads[layer] for layer in layers]),
            kv_projections=merge_equal([1 if joined and kind != "sliding_attention" else 2 for kind in kinds]),
            mlp_matrices=count_mlp_matrices(config),
        )

    def layer_flops(self, tokens: float, attention: float = 1.0, layer: int = 0) -> float:
        """Multiply-adds x 2 of one layer in prefill: projections, MLP, and attention over the full square (as
        papers count it, causal masking not deducted). Norms, rotary embedding and softmax are left out.

        attention: share of causal attention's pairs of query and key that are computed."""
        query = _at(self.heads, layer) * _at(self.head_dim, layer)
        kv = _at(self.kv_heads, layer) * _at(self.head_dim, layer) * _at(self.kv_projections, layer)
        linear = 2 * tokens * self.hidden * (2 * query + kv + self.mlp_matrices * _at(self.intermediate, layer))
        return linear + 4 * tokens * tokens * query * attention

    def prefill_flops(
        self, tokens_per_layer: Sequence[float], attention_per_layer: Sequence[float] | None = None
    ) -> float:
        """Sum of `layer_flops` over the layers; the vision tower and the output head are not in it."""
        attention = attention_per_layer or [1.0] * len(tokens_per_layer)
        pairs = zip(tokens_per_layer, attention, strict=True)
        return sum(self.layer_flops(tokens, share, layer) for layer, (tokens, share) in enumerate(pairs))

    def kv_bytes(self, tokens_per_layer: list[int], bytes_per_number: int) -> int:
        """Bytes of keys and values over all layers."""
        widths = zip(tokens_per_layer, self.kv_widths, strict=False)
        return 2 * bytes_per_number * sum(tokens * width for tokens, width in widths)

    @property
    def num_weights(self) -> int:
        """Numbers in the matrices of all layers; norms, embeddings and the output head are left out."""
        total = 0
        for layer in range(self.layers):
            query = _at(self.heads, layer) * _at(self.head_dim, layer)
            kv = _at(self.kv_heads, layer) * _at(self.head_dim, layer) * _at(self.kv_projections, layer)
            total += self.hidden * (2 * query + kv + self.mlp_matrices * _at(self.intermediate, layer))
        return total

    @property
    def kv_widths(self) -> list[int]:
        """Return the numbers in a token's key in each layer, over all heads; its value has as many."""
        return [_at(self.kv_heads, layer) * _at(self.head_dim, layer) for layer in range(self.layers)]
