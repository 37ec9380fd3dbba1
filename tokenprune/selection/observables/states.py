# SPDX-License-Identifier: Apache-2.0
"""Observables of the states of tokens: hidden states, keys, values and rotations, at the cut and one layer before."""

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
    """`[S, N, D]`, model dtype: the tokens as they arrive at the cut (PRE_LLM: the projected embeddings)."""

    where = ObservedAt.CUT
    backends = frozenset(Backend)

    def read_values(self, source: TokenSource) -> Tensor:
        return source.hidden


@register_observable("normed")
class Normed(Observable):
    """`[S, N, D]`: `hidden` after the decoder's final norm."""

    where = ObservedAt.CUT
    backends = frozenset(Backend)

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.final_norm(Hidden().compute_visual(source, segments))

    def compute_text(self, source: TokenSource, text: TextView) -> Tensor:
        return source.final_norm(text.hidden)


@register_observable("previous_hidden")
class PreviousHidden(PerToken):
    """`[S, N, D]`: the hidden states that entered the layer before the cut, of which that layer made `hidden`."""

    where = ObservedAt.INPUT_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_values(self, source: TokenSource) -> Tensor:
        return source.input_before.hidden


@register_observable("embeddings")
class Embeddings(Observable):
    """`[S, N, D]`: what enters the decoder, wherever the cut is; at its entry the same as `hidden`."""

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
    """`[S, N, Hkv * Dh]`: keys of the layer before the cut, after rotary embedding, heads flattened."""

    where = ObservedAt.LAYER_BEFORE
    absolute = True
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.keys(source.width)


class PerHead(PerToken):
    """Base of what each token has one of for each head of the layer before the cut."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SNHD"

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.tokens, sizes.heads, sizes.width // sizes.heads, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.text, sizes.heads, sizes.width // sizes.heads, generator=generator)


@register_observable("query_heads")
class QueryHeads(PerHead):
    """`[S, N, H, Dh]`: queries of the layer before the cut, after rotary embedding, head by head."""

    absolute = True

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.query_heads(source.width)


@register_observable("key_heads")
class KeyHeads(PerHead):
    """`[S, N, Hkv, Dh]`: keys of the layer before the cut, after rotary embedding, head by head; those of `keys`
    otherwise."""

    absolute = True

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.keys(source.width).unflatten(-1, (-1, source.attention_before.key.shape[-1]))


@register_observable("values")
class Values(PerToken):
    """`[S, N, Hkv * Dv]`: values of the layer before the cut, heads flattened."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.values(source.width)


@register_observable("value_heads")
class ValueHeads(PerHead):
    """`[S, N, Hkv, Dv]`: values of the layer before the cut, head by head; those of `values` otherwise."""

    def read_values(self, source: TokenSource) -> Tensor:
        return source.attention_before.value_heads(source.width)


@register_observable("rotation")
class Rotation(Observable):
    """(cos, sin), `[S, N, R]` each: by which angles the layer before the cut turns queries and keys of each token, with
    the factor that some families scale them by."""

    where = ObservedAt.INPUT_BEFORE
    rotary = absolute = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> tuple[Tensor, Tensor]:
        return self._at(source, segments.position, segments)

    def compute_text(self, source: TokenSource, text: TextView) -> tuple[Tensor, Tensor]:
        return self._at(source, text.position, text.segments)

    @staticmethod
    def _at(source: TokenSource, position: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        assert source.input_before.rotation is not None  # `rotary`: engines refuse decoders without
        cos, sin = source.input_before.rotation
        return source.gather(cos, position, segments), source.gather(sin, position, segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = uniform(sizes.segments, sizes.tokens, sizes.width // sizes.heads, generator=generator)
        return angles.cos(), angles.sin()

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        angles = uniform(sizes.segments, sizes.text, sizes.width // sizes.heads, generator=generator)
        return angles.cos(), angles.sin()
