# SPDX-License-Identifier: Apache-2.0
"""Observables of the attention that the text of a prompt pays to the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.selection.observable import AttentionFromText, Backend, Observable, ObservedAt, add_up
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("text_attention")
class TextAttention(AttentionFromText):
    """float32 `[S, H, M, N]`: softmax attention of each text token after an image to each visual token, in the layer
    before the cut; 0 at padding. `tokens.text.attention`, `[S, H, M, M]`, is that to each text token, and
    `tokens.attention_from(weights)`, `[S, H, N]`, the weighted sum over the text, which never holds all rows."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})
    text_name = "attention"

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before


@register_observable("next_text_attention")
class NextTextAttention(AttentionFromText):
    """float32 `[S, H, M, N]`: the same as `text_attention` in the layer after the cut, by that layer's own
    projections, if nothing was cut; `tokens.text.next_attention` is that to the text."""

    where = ObservedAt.NEXT_LAYER
    text_name = "next_attention"

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_after


@register_observable("head_maxima")
class HeadMaxima(AttentionFromText):
    """float32 `[S, 2, N]`: attention that each visual token gets in the layer before the cut, of each row the most of
    any head: the mean over the rows of the image's tokens, and that over the text after it, 0 where there is none."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SRN"
    all_rows = True
    compute_text = Observable.compute_text  # of visual tokens alone

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        own = self._mean(self._rows(source, segments, segments.position), segments.mask)
        position, mask = source.find_text_after(segments)
        by_text = self._mean(self._text_rows(source, segments, position, segments.position), mask)
        found = torch.stack([own.gather(1, source.find_slots(segments.position, segments)), by_text], dim=1)
        return found.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, 2, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None

    @staticmethod
    def _mean(parts: Iterable[tuple[Tensor, slice]], mask: Tensor) -> Tensor:
        """Return `[S, K]`, of the rows that are there, `mask` `[S, M]`, the mean of the most of any head."""
        total = add_up(rows.amax(1).mul_(mask[:, part, None]).sum(1) for rows, part in parts)
        return total / mask.sum(1, keepdim=True).clamp(min=1)


@register_observable("text_sum_and_max")
class TextSumAndMax(AttentionFromText):
    """float32 `[S, 2, N]`: attention that each visual token gets from the text after its image in the layer before the
    cut, mean over heads: the sum over the text's tokens, and the most of any; 0 where no text is after."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SRN"
    compute_text = Observable.compute_text  # of visual tokens alone

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        total: Tensor | None = None
        most: Tensor | None = None
        for rows, part in self._text_rows(source, segments, position, segments.position):
            mean = rows.mean(1).mul_(mask[:, part, None])  # padding is among the rows
            total = mean.sum(1) if total is None else total + mean.sum(1)
            most = mean.amax(1) if most is None else torch.maximum(most, mean.amax(1))
        if total is None or most is None:  # no text after any image
            return torch.zeros(len(mask), 2, segments.mask.shape[1], dtype=torch.float32, device=mask.device)
        found = torch.stack([total, most], dim=1)
        return found.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, 2, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None


@register_observable("first_layer_scores")
class FirstLayerScores(Observable):
    """float32 `[S, H, N]`: products of the mean query of the text after each image and the key of each visual token in
    the decoder's first layer, over the root of a head's width, without rotation and softmax; 0 where no text is after.
    Its norms and projections are applied to what enters the decoder; the layer is not run."""

    where = ObservedAt.ENTRY
    axes = "SHN"
    whole = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        query = projected(source.first_layer, "q", source.get_embeddings(position, segments))
        key = projected(source.first_layer, "k", source.get_embeddings(segments.position, segments))
        mean = query.masked_fill(~mask[..., None, None], 0).sum(1) / mask.sum(1).clamp(min=1)[:, None, None]
        found = torch.einsum("skgd,snkd->skgn", mean.unflatten(1, (key.shape[2], -1)), key) * key.shape[3] ** -0.5
        return found.flatten(1, 2).masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)


def projected(layer: Any, which: str, hidden: Tensor) -> Tensor:
    """float32 `[S, M, heads, Dh]`: queries ("q") or keys ("k") that a decoder layer makes of `hidden`, `[S, M, D]`,
    before rotary embedding."""
    attention = layer.self_attn
    made = getattr(attention, f"{which}_proj")(layer.input_layernorm(hidden))
    norm, heads = getattr(attention, f"{which}_norm", None), (-1, attention.head_dim)
    if norm is not None and norm.weight.shape[-1] == made.shape[-1]:  # of all heads together
        made, norm = norm(made), None
    made = made.unflatten(-1, heads)
    return (made if norm is None else norm(made)).float()
