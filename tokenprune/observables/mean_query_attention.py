# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenprune.ops.drawn import uniform
from tokenprune.ops.transfer import to_device
from tokenprune.ops.weights import evenly
from tokenprune.view.observable import Observable, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention, Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("mean_query_attention")
class MeanQueryAttention(Observable):
    """float32 `[S, H, N]`: attention that the mean query of all tokens up to the image's last one pays to each visual
    token, among these tokens, in the layer before the cut, if queries and keys were not rotated. Tokens of earlier
    turns are left out."""

    where = ObservedAt.UNROTATED
    axes = "SHN"
    rotary = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        seen, real = source.unrotated, source.real()
        slots, device = source.slots(segments.position, segments), real.device
        last = slots.masked_fill(~segments.mask, -1).amax(1, keepdim=True)
        own = real[segments.row_index.squeeze(1)] & (torch.arange(source.width, device=device) <= last)
        # Segments of a row ask for their rows side by side.
        row, place = to_device(segments.row, device), to_device(segments.ordinal, device)
        among = own.new_zeros(len(real), max(segments.ordinal) + 1, source.width).index_put((row, place), own)
        mean = (evenly(among).unsqueeze(1) @ seen.query[:, :, -source.width :].float()).to(seen.key.dtype)
        # Engines give dataclasses.
        asking: SeenAttention = replace(cast(Any, seen), query=mean, mask=among.unsqueeze(1))
        index = torch.arange(among.shape[1], device=device).expand(len(real), -1)
        rows = asking.rows(index).transpose(1, 2)[row, place]
        found = rows.gather(2, slots[:, None].expand(-1, rows.shape[1], -1))
        return found.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, sizes.heads, sizes.tokens, generator=generator)
