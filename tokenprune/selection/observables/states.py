# SPDX-License-Identifier: Apache-2.0
"""Observables of token states: hidden states, keys, values and rotations, at the cut and in the layer before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.kernels.host_random import normal, uniform
from tokenprune.selection.observable import Backend, Observable, ObservedAt, PerToken
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import Segments, Sizes, TextView
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@register_observable("hidden")
class Hidden(PerToken):
    """Hidden states at the cut, shape (S, N, D), model dtype. For PRE_LLM these are the projected image features."""

    where = ObservedAt.CUT
    backends = frozenset(Backend)

    def read_values(self, source: TokenSource) -> Tensor:
        return source.hidden


@register_observable("normed")
class Normed(Observable):
    """`hidden` after the final norm of the decoder, shape (S, N, D)."""

    where = ObservedAt.CUT
    backends = frozenset(Backend)

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.final_norm(Hidden().compute_visual(source, segments))

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.final_norm(text.hidden)


@register_observable("previous_hidden")
class PreviousHidden(PerToken):
    """Hidden states at the input of the layer before the cut, shape (S, N, D)."""

    where = ObservedAt.INPUT_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_values(self, source: TokenSource) -> Tensor:
        return source.input_before.hidden


@register_observable("embeddings")
class Embeddings(Observable):
    """Input of the decoder, shape (S, N, D). Equal to `hidden` if the cut is at the input of the decoder."""

    where = ObservedAt.ENTRY
    backends = frozenset({Backend.HF, Backend.VLLM})

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.get_embeddings(segments.position, segments)

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.get_embeddings(text.position, text.segments)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.width, generator=generator)


@register_observable("keys")
class Keys(PerToken):
    """Keys of the layer before the cut, after rotary embedding, shape (S, N, Hkv * Dh)."""

    where = ObservedAt.LAYER_BEFORE
    absolute = True
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.keys(source.width)


class PerHead(PerToken):
    """Base class of observables with one vector per token and head in the layer before the cut."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SNHD"

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.tokens, sizes.heads, sizes.width // sizes.heads, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.heads, sizes.width // sizes.heads, generator=generator)


@register_observable("query_heads")
class QueryHeads(PerHead):
    """Queries of the layer before the cut, after rotary embedding, shape (S, N, H, Dh)."""

    absolute = True

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.query_heads(source.width)


@register_observable("key_heads")
class KeyHeads(PerHead):
    """Keys of the layer before the cut, after rotary embedding, shape (S, N, Hkv, Dh)."""

    absolute = True

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.keys(source.width).unflatten(-1, (-1, source.attention_before.key.shape[-1]))


@register_observable("values")
class Values(PerToken):
    """Values of the layer before the cut, shape (S, N, Hkv * Dv)."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.values(source.width)


@register_observable("value_heads")
class ValueHeads(PerHead):
    """Values of the layer before the cut, shape (S, N, Hkv, Dv)."""

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.value_heads(source.width)


@register_observable("rotation")
class Rotation(Observable):
    """Rotary embedding of each token in the layer before the cut, as (cos, sin) of shape (S, N, R) each.

    Includes the scaling factor of some model families.
    """

    where = ObservedAt.INPUT_BEFORE
    rotary = absolute = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> tuple[Tensor, Tensor]:
        return self._gather(source, segments.position, segments)

    def compute_text(self, source: TokenSource, text: TextView) -> tuple[Tensor, Tensor]:
        return self._gather(source, text.position, text.segments)

    @staticmethod
    def _gather(source: TokenSource, position: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        assert source.input_before.rotation is not None  # `rotary`: engines refuse decoders without rotary embedding
        cos, sin = source.input_before.rotation
        return source.gather(cos, position, segments), source.gather(sin, position, segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = uniform(sizes.segments, sizes.tokens, sizes.width // sizes.heads, generator=generator)
        return angles.cos(), angles.sin()

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = uniform(sizes.segments, sizes.text, sizes.width // sizes.heads, generator=generator)
        return angles.cos(), angles.sin()
