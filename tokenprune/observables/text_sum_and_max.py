# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.ops.drawn import uniform
from tokenprune.view.observable import AttentionOfText, Observable, ObservedAt
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import SeenAttention, Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("text_sum_and_max")
class TextSumAndMax(AttentionOfText):
    """float32 `[S, 2, N]`: attention that each visual token gets from the text behind its image in the layer before the
    cut, mean over heads: the sum over the text's tokens, and the most of any; 0 where no text is behind."""

    where = ObservedAt.LAYER_BEFORE
    axes = "SRN"
    of_text = Observable.of_text  # of visual tokens alone

    def observed(self, source: TokenSource) -> SeenAttention:
        return source.before

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        position, mask = source.text_after(segments)
        total: Tensor | None = None
        most: Tensor | None = None
        for rows, part in self._text_rows(source, segments, position, segments.position):
            mean = rows.mean(1).mul_(mask[:, part, None])  # padding is among the rows
            total = mean.sum(1) if total is None else total + mean.sum(1)
            most = mean.amax(1) if most is None else torch.maximum(most, mean.amax(1))
        if total is None or most is None:  # no text behind any image
            return torch.zeros(len(mask), 2, segments.mask.shape[1], dtype=torch.float32, device=mask.device)
        found = torch.stack([total, most], dim=1)
        return found.masked_fill(~segments.mask[:, None], 0)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return uniform(sizes.segments, 2, sizes.tokens, generator=generator)

    def text_example(self, sizes: Sizes, generator: torch.Generator) -> None:
        return None
