# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.observable import Observable, Sizes, Where
from tokenprune.observable_registry import register_observable
from tokenprune.tokens import Segments, TokenSource


@register_observable("last_row_output")
class LastRowOutput(Observable):
    """float32 `[S, H, Dv]`: what the attention of the layer before the cut makes for the last prompt token, head by
    head, before the output projection: the values of all tokens, weighted by `last_row_attention`."""

    where = Where.LAYER_BEFORE
    axes = "SHD"
    whole = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        attention = source.before.rows(source.last_slot())[:, :, 0]  # [B, H, K]
        values = source.before.values(attention.shape[2]).unflatten(-1, (-1, source.before.value.shape[-1]))
        values = values.repeat_interleave(attention.shape[1] // values.shape[2], dim=2)
        made = torch.einsum("bhk,bkhd->bhd", attention, values.float())
        return made[segments.row_index.squeeze(1)]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return torch.randn(sizes.segments, sizes.heads, sizes.width // sizes.heads, generator=generator)
