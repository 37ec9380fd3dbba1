# SPDX-License-Identifier: Apache-2.0
"""Observables of the attention from the text of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from tokenprune.kernels.host_random import uniform
from tokenprune.selection.observable import Backend, Input, Observable, ObservedAt
from tokenprune.selection.observable_bases import AttentionFromText, add_up
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("text_attention")
class TextAttention(AttentionFromText):
    """Attention from each text token after an image in the layer before the cut, shape (S, H, M, N), float32.

    Padding is 0. `tokens.text.attention`, shape (S, H, M, M), is the attention to text tokens.
    `tokens.attention_from(weights)`, shape (S, H, N), is a weighted sum over the text that never stores all rows.
    """

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})
    text_name = "attention"

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before


@register_observable("next_text_attention")
class NextTextAttention(AttentionFromText):
    """`text_attention` in the layer after the cut, before tokens are dropped, shape (S, H, M, N), float32.

    Computed with the projections of that layer. `tokens.text.next_attention` is the attention to text tokens.
    """

    where = ObservedAt.NEXT_LAYER
    text_name = "next_attention"

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_after


@register_observable("first_row_attention")
class FirstRowAttention(AttentionFromText):
    """Attention from the first text token after an image in the layer before the cut, shape (S, H, N), float32.

    This token attends to the image and to the tokens before it, never to the question. 0 if no text follows the image.
    """

    where = ObservedAt.LAYER_BEFORE
    axes = "SHN"
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})
    compute_text = Observable.compute_text  # not defined for text

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        has_text = mask.any(1, keepdim=True)
        # A segment without text reads the row of its own first token, which is then replaced by 0.
        first = torch.cat([position, segments.position[:, :1]], 1)
        first = first.masked_fill(~torch.cat([mask, ~has_text], 1), torch.iinfo(first.dtype).max).amin(1, keepdim=True)
        ((rows, _),) = self._rows(source, segments, first)
        columns = source.find_slots(segments.position, segments)[:, None].expand(-1, rows.shape[1], -1)
        return rows[:, :, 0].gather(2, columns).masked_fill(~(segments.mask & has_text)[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None


@register_observable("head_maxima")
class HeadMaxima(AttentionFromText):
    """Attention to each visual token, maximum over the heads, averaged over image and over text rows, (S, 2, N).

    The first entry averages over the tokens of the image, the second over the text after it (0 without text). float32,
    read in the layer before the cut.
    """

    where = ObservedAt.LAYER_BEFORE
    axes = "SRN"
    all_rows = True
    compute_text = Observable.compute_text  # not defined for text

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        from_image = self._mean(self._rows(source, segments, segments.position), segments.mask)
        position, mask = source.find_text_after(segments)
        from_text = self._mean(self._text_rows(source, segments, position, segments.position), mask)
        from_image = from_image.gather(1, source.find_slots(segments.position, segments))
        return torch.stack([from_image, from_text], dim=1).masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, 2, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None

    @staticmethod
    def _mean(parts: Iterable[tuple[Tensor, slice]], mask: Tensor) -> Tensor:
        """Return the maximum over the heads, averaged over the rows in `mask` (S, M), shape (S, K)."""
        total = add_up(rows.amax(1).mul_(mask[:, part, None]).sum(1) for rows, part in parts)
        return total / mask.sum(1, keepdim=True).clamp(min=1)


@register_observable("text_sum_and_max")
class TextSumAndMax(AttentionFromText):
    """Sum and maximum over the text of the attention to each visual token, shape (S, 2, N), float32.

    Averaged over the heads, in the layer before the cut. 0 if no text follows the image.
    """

    where = ObservedAt.LAYER_BEFORE
    axes = "SRN"
    compute_text = Observable.compute_text  # not defined for text

    def get_attention(self, source: TokenSource) -> ObservedAttention:
        return source.attention_before

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        total: Tensor | None = None
        maximum: Tensor | None = None
        for rows, part in self._text_rows(source, segments, position, segments.position):
            mean = rows.mean(1).mul_(mask[:, part, None])  # the rows include padding
            total = mean.sum(1) if total is None else total + mean.sum(1)
            maximum = mean.amax(1) if maximum is None else torch.maximum(maximum, mean.amax(1))
        if total is None or maximum is None:  # no text after any image
            return torch.zeros(len(mask), 2, segments.mask.shape[1], dtype=torch.float32, device=mask.device)
        return torch.stack([total, maximum], dim=1).masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, 2, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None


@register_observable("first_layer_scores")
class FirstLayerScores(Observable):
    """Logits of the mean text query and each visual key in the first decoder layer, shape (S, H, N), float32.

    Scaled by the square root of the head width, without rotary embedding and softmax. The norm and projections of the
    layer are applied to the input of the decoder. The layer does not run. 0 if no text follows the image.
    """

    where = ObservedAt.ENTRY
    axes = "SHN"
    needs_full_prompt = True
    from_input = Input.DECODER

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.find_text_after(segments)
        query = project(source.first_layer, "q", source.get_embeddings(position, segments))
        key = project(source.first_layer, "k", source.get_embeddings(segments.position, segments))
        mean = query.masked_fill(~mask[..., None, None], 0).sum(1) / mask.sum(1).clamp(min=1)[:, None, None]
        logits = torch.einsum("skgd,snkd->skgn", mean.unflatten(1, (key.shape[2], -1)), key) * key.shape[3] ** -0.5
        return logits.flatten(1, 2).masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)


def project(layer: Any, which: str, hidden: Tensor) -> Tensor:
    """Return queries ("q") or keys ("k") of a decoder layer before rotary embedding, shape (S, M, heads, Dh), float32.

    Args:
        layer: Decoder layer.
        which: "q" or "k".
        hidden: Input of the layer, shape (S, M, D).
    """
    attention = layer.self_attn
    states = getattr(attention, f"{which}_proj")(layer.input_layernorm(hidden))
    norm, heads = getattr(attention, f"{which}_norm", None), (-1, attention.head_dim)
    if norm is not None and norm.weight.shape[-1] == states.shape[-1]:  # one norm for all heads
        states, norm = norm(states), None
    states = states.unflatten(-1, heads)
    return (states if norm is None else norm(states)).float()
