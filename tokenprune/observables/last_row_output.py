# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.ops.drawn import normal
from tokenprune.view.observable import Observable, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("last_row_output")
class LastRowOutput(Observable):
    """float32 `[S, H, Dv]`: what the attention of the layer before the cut makes for the last prompt token, head by
    head, before the output projection: the values of all tokens, weighted by `last_row_attention`."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SHD"
    whole = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        attention = source.last_row
        values = source.before.value_heads(attention.shape[2]).float()
        made = torch.einsum("bhgk,bkhd->bhgd", attention.unflatten(1, (values.shape[2], -1)), values)
        return made.flatten(1, 2)[segments.row_index.squeeze(1)]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return normal(sizes.segments, sizes.heads, sizes.width // sizes.heads, generator=generator)
