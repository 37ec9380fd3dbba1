# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterable
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
        own = self._mean(self._rows(source, segments, segments.position), segments.mask)
        position, mask = source.text_after(segments)
        by_text = self._mean(self._text_rows(source, segments, position, segments.position), mask)
        found = torch.stack([own.gather(1, source.slots(segments.position, segments)), by_text], dim=1)
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
