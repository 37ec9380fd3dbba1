# SPDX-License-Identifier: Apache-2.0
"""Closed-form prefill FLOPs and KV cache bytes of a decoder, from its config and the tokens in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenprune.models.per_layer import count_mlp_matrices, find_keyless_layers, get_layer_values, merge_equal

# One size for all layers, or one size per layer.
Size = int | tuple[int, ...]
# Names of the MLP width in configs without `intermediate_size`.
_WIDTHS = ("ffn_dim", "n_inner", "ffn_hidden_size")


def _get_size(size: Size, layer: int) -> int:
    return size[layer] if isinstance(size, tuple) else size


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder for closed-form costs. Sizes of type `Size` are tuples if layers differ.

    Args:
        layers: Number of layers.
        hidden: Width of the hidden states.
        intermediate: Width of the MLP.
        heads: Number of query heads.
        kv_heads: Number of key heads. 0 for layers that use the keys of another layer.
        head_dim: Width of a head.
        kv_projections: Projections for keys and values. 1 if values are the projected keys.
        mlp_matrices: Weight matrices of an MLP: 3 with a gate, 2 without (OPT).

    Examples:
        >>> shape = DecoderShape(32, 4096, 11008, 32, 32, 128)
        >>> half = shape.prefill_flops([300] * 32) / shape.prefill_flops([600] * 32)
        >>> round(half, 2)
        0.49
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
        """Create the shape from a Hugging Face text config."""
        layers, hidden = range(config.num_hidden_layers), config.hidden_size
        keyless = find_keyless_layers(config)
        heads = get_layer_values(config, "num_attention_heads")
        kv_heads = get_layer_values(config, "num_key_value_heads")
        head_dim = get_layer_values(config, "head_dim")
        own_name = next((name for name in _WIDTHS if getattr(config, name, None)), None)  # GPT-like models
        default = getattr(config, own_name) if own_name else 4 * hidden
        intermediate = [width or default for width in get_layer_values(config, "intermediate_size")]
        if getattr(config, "use_double_wide_mlp", False):  # Gemma 4 layers with shared keys
            intermediate = [width * (2 if layer in keyless else 1) for layer, width in enumerate(intermediate)]
        kinds = get_layer_values(config, "layer_types")
        joined = getattr(config, "attention_k_eq_v", False)  # Gemma 4 layers with full attention
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
        """Return the FLOPs (2 per multiply-add) of one layer in prefill.

        Counts projections, MLP, and attention over the full square, as papers do (no causal discount). Excludes norms,
        rotary embedding and softmax.

        Args:
            tokens: Number of tokens in the layer.
            attention: Share of the causal query-key pairs that are computed.
            layer: Index of the layer.
        """
        query = _get_size(self.heads, layer) * _get_size(self.head_dim, layer)
        kv = _get_size(self.kv_heads, layer) * _get_size(self.head_dim, layer) * _get_size(self.kv_projections, layer)
        linear = 2 * tokens * self.hidden * (2 * query + kv + self.mlp_matrices * _get_size(self.intermediate, layer))
        return linear + 4 * tokens * tokens * query * attention

    def prefill_flops(
        self, tokens_per_layer: Sequence[float], attention_per_layer: Sequence[float] | None = None
    ) -> float:
        """Return the sum of `layer_flops` over the layers, without vision tower and output head."""
        attention = attention_per_layer or [1.0] * len(tokens_per_layer)
        pairs = zip(tokens_per_layer, attention, strict=True)
        return sum(self.layer_flops(tokens, share, layer) for layer, (tokens, share) in enumerate(pairs))

    def kv_bytes(self, tokens_per_layer: list[int], bytes_per_number: int) -> int:
        """Return the bytes of keys and values over all layers."""
        widths = zip(tokens_per_layer, self.kv_widths, strict=False)
        return 2 * bytes_per_number * sum(tokens * width for tokens, width in widths)

    @property
    def num_weights(self) -> int:
        """Number of weights in the matrices of all layers, without norms, embeddings and output head."""
        total = 0
        for layer in range(self.layers):
            query = _get_size(self.heads, layer) * _get_size(self.head_dim, layer)
            kv = (
                _get_size(self.kv_heads, layer)
                * _get_size(self.head_dim, layer)
                * _get_size(self.kv_projections, layer)
            )
            total += self.hidden * (2 * query + kv + self.mlp_matrices * _get_size(self.intermediate, layer))
        return total

    @property
    def kv_widths(self) -> list[int]:
        """Width of a token's key in each layer, over all heads. Values have the same width."""
        return [_get_size(self.kv_heads, layer) * _get_size(self.head_dim, layer) for layer in range(self.layers)]
