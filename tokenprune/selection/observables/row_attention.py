# SPDX-License-Identifier: Apache-2.0
"""Observables of the attention that rows of a decoder layer pay to the tokens, or all rows together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.kernels.host_random import normal, uniform
from tokenprune.kernels.masses import uniform_weights
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.observable import AttentionToTokens, Backend, Observable, ObservedAt
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import ObservedAttention, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("last_row_attention")
class LastRowAttention(AttentionToTokens):
    """float32 `[S, H, N]`: softmax attention of the last prompt token over each visual token, in the layer before the
    cut."""

    where = ObservedAt.LAYER_BEFORE
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.last_row[:, :, -source.width :]


@register_observable("received_attention")
class ReceivedAttention(AttentionToTokens):
    """float32 `[S, H, N]`: mean attention that each visual token receives from all tokens that may see it, in the layer
    before the cut."""

    where = ObservedAt.LAYER_BEFORE
    all_rows = True
    backends = frozenset({Backend.HF, Backend.VLLM_IN_LLM})

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.attention_before.column_means(source.get_token_mask())


@register_observable("next_row_attention")
class NextRowAttention(AttentionToTokens):
    """float32 `[S, H, N]`: softmax attention that the last prompt token would pay to each visual token in the layer
    after the cut, by that layer's own projections, if nothing was cut."""

    where = ObservedAt.NEXT_LAYER

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.attention_after.rows(source.get_last_slot())[:, :, 0, -source.width :]


@register_observable("unrotated_last_row")
class UnrotatedLastRow(AttentionToTokens):
    """float32 `[S, H, N]`: softmax attention of the last prompt token over each visual token, in the layer before the
    cut, if queries and keys were not rotated: what it attends to whatever the distance. Tokens of earlier turns are
    left out of the softmax."""

    where = ObservedAt.UNROTATED
    rotary = True

    def read_columns(self, source: TokenSource) -> Tensor:
        return source.unrotated_attention.rows(source.get_last_slot())[:, :, 0, -source.width :]


@register_observable("last_row_output")
class LastRowOutput(Observable):
    """float32 `[S, H, Dv]`: what the attention of the layer before the cut makes for the last prompt token, head by
    head, before the output projection: the values of all tokens, weighted by `last_row_attention`."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SHD"
    whole = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        attention = source.last_row
        values = source.attention_before.value_heads(attention.shape[2]).float()
        made = torch.einsum("bhgk,bkhd->bhgd", attention.unflatten(1, (values.shape[2], -1)), values)
        return made.flatten(1, 2)[segments.row_index.squeeze(1)]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.heads, sizes.width // sizes.heads, generator=generator)


@register_observable("mean_query_attention")
class MeanQueryAttention(Observable):
    """float32 `[S, H, N]`: attention that the mean query of all tokens up to the image's last one pays to each visual
    token, among these tokens, in the layer before the cut, if queries and keys were not rotated. Tokens of earlier
    turns are left out."""

    where = ObservedAt.UNROTATED
    axes = "SHN"
    rotary = True

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        seen, real = source.unrotated_attention, source.get_token_mask()
        slots, device = source.find_slots(segments.position, segments), real.device
        last = slots.masked_fill(~segments.mask, -1).amax(1, keepdim=True)
        own = real[segments.row_index.squeeze(1)] & (torch.arange(source.width, device=device) <= last)
        # Segments of a row ask for their rows side by side.
        row, place = to_device(segments.row, device), to_device(segments.ordinal, device)
        among = own.new_zeros(len(real), max(segments.ordinal) + 1, source.width).index_put((row, place), own)
        mean = (uniform_weights(among).unsqueeze(1) @ seen.query[:, :, -source.width :].float()).to(seen.key.dtype)
        # Engines give dataclasses.
        asking: ObservedAttention = replace(cast(Any, seen), query=mean, mask=among.unsqueeze(1))
        index = torch.arange(among.shape[1], device=device).expand(len(real), -1)
        rows = asking.rows(index).transpose(1, 2)[row, place]
        found = rows.gather(2, slots[:, None].expand(-1, rows.shape[1], -1))
        return found.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)
