# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.view.observable import Observable, Where
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("transitions")
class Transitions(Observable):
    """float32 `[S, N, 2, 2]`: what the attention module and the MLP of the layer before the cut make of what they get:
    how many times as long it becomes, and its cosine to what it was."""

    where = Where.MODULES_BEFORE
    axes = "SNMT"

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return source.at(source.transitions, segments.position, segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        made = torch.rand(sizes.segments, sizes.tokens, 2, 2, generator=generator)
        return made * torch.tensor([3.0, 2.0]) - torch.tensor([0.0, 1.0])
