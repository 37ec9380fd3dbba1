# SPDX-License-Identifier: Apache-2.0
"""Observables of the attention from single tokens, or from all tokens, in a decoder layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.kernels.host_random import normal, uniform
from tokenprune.kernels.masses import uniform_weights
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import Backend, Observable, ObservedAt
from tokenprune.selection.observable_bases import AttentionToTokens
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("last_row_attention")
class LastRowAttention(AttentionToTokens):
    """Attention from the last prompt token to each visual token in the layer before the cut, (S, H, N), float32."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.last_row[:, :, -source.width :]


@register_observable("received_attention")
class ReceivedAttention(AttentionToTokens):
    """Mean attention that each visual token receives in the layer before the cut, shape (S, H, N), float32.

    The mean is over all tokens that may attend to it.
    """

    where = ObservedAt.LAYER_BEFORE
    all_rows = True
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.attention_before.column_means(source.get_token_mask())


@register_observable("next_row_attention")
class NextRowAttention(AttentionToTokens):
    """Attention from the last prompt token in the layer after the cut, before tokens are dropped, (S, H, N), float32.

    Computed with the projections of that layer.
    """

    where = ObservedAt.NEXT_LAYER

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.attention_after.rows(source.get_last_slot())[:, :, 0, -source.width :]


@register_observable("unrotated_last_row")
class UnrotatedLastRow(AttentionToTokens):
    """Attention from the last prompt token without rotary embedding, shape (S, H, N), float32.

    It does not depend on the distance. The softmax excludes tokens of earlier turns. Read in the layer before the cut.
    """

    where = ObservedAt.UNROTATED
    rotary = True

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.unrotated_attention.rows(source.get_last_slot())[:, :, 0, -source.width :]


@register_observable("last_row_output")
class LastRowOutput(Observable):
    """Attention output of the last prompt token before the output projection, shape (S, H, Dv), float32.

    The mean of the values of all tokens, weighted by the attention of the layer before the cut.
    """

    where = ObservedAt.LAYER_BEFORE
    axes = "SHD"
    needs_full_prompt = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        attention = source.last_row
        values = source.attention_before.value_heads(attention.shape[2]).float()
        output = torch.einsum("bhgk,bkhd->bhgd", attention.unflatten(1, (values.shape[2], -1)), values)
        return output.flatten(1, 2)[segments.row_index.squeeze(1)]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.heads, sizes.width // sizes.heads, generator=generator)


@register_observable("mean_query_attention")
class MeanQueryAttention(Observable):
    """Attention from the mean query of all tokens up to the end of the image, shape (S, H, N), float32.

    Read in the layer before the cut, without rotary embedding. The mean and the softmax run over the same tokens, and
    exclude tokens of earlier turns.
    """

    where = ObservedAt.UNROTATED
    axes = "SHN"
    rotary = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        attention, token_mask = source.unrotated_attention, source.get_token_mask()
        slots, device = source.find_slots(segments.position, segments), token_mask.device
        last = slots.masked_fill(~segments.mask, -1).amax(1, keepdim=True)
        mask = token_mask[segments.row_index.squeeze(1)] & (torch.arange(source.width, device=device) <= last)
        # The segments of a row are computed side by side.
        row, ordinal = to_device(segments.row, device), to_device(segments.ordinal, device)
        masks = mask.new_zeros(len(token_mask), max(segments.ordinal) + 1, source.width).index_put((row, ordinal), mask)
        mean = uniform_weights(masks).unsqueeze(1) @ attention.query[:, :, -source.width :].float()
        mean = mean.to(attention.key.dtype)
        # The attention of every engine is a dataclass.
        from_mean: ObservedAttention = replace(cast(Any, attention), query=mean, mask=masks.unsqueeze(1))
        index = torch.arange(masks.shape[1], device=device).expand(len(token_mask), -1)
        rows = from_mean.rows(index).transpose(1, 2)[row, ordinal]
        values = rows.gather(2, slots[:, None].expand(-1, rows.shape[1], -1))
        return values.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)
