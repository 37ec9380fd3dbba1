# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.ops.drawn import uniform
from tokenprune.view.observable import AttentionOfText, Observable, ObservedAt, add_up
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention, Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("head_maxima")
class HeadMaxima(AttentionOfText):
    """float32 `[S, 2, N]`: attention that each visual token gets in the layer before the cut, of each row the most of
    any head: the mean over the rows of the image's tokens, and that over the text behind it, 0 where there is none."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SRN"
    all_rows = True
    of_text = Observable.of_text  # of visual tokens alone

    def observed(self, source: TokenSource) -> SeenAttention:
        return source.before

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        both = (segments.position, segments.mask), source.text_after(segments)
        found = torch.stack([self._mean(source, segments, *one) for one in both], dim=1)
        return found.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, 2, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None

    def _mean(self, source: TokenSource, segments: Segments, position: Tensor, mask: Tensor) -> Tensor:
        parts = self._rows(source, segments, position)
        total = add_up(rows.amax(1).mul_(mask[:, part, None]).sum(1) for rows, part in parts)
        slots = source.slots(segments.position, segments)
        return total.gather(1, slots) / mask.sum(1, keepdim=True).clamp(min=1)
