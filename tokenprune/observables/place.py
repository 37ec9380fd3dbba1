# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.observable import Observable, Sizes, Where
from tokenprune.observable_registry import register_observable
from tokenprune.observables.frames import frame_and_place
from tokenprune.tokens import Segments, TokenSource


@register_observable("place")
class Place(Observable):
    """long `[S, N]`: index of each token in its frame; -1 for what is in no frame."""

    where = Where.CUT
    axes = "SN"
    of_frames = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return frame_and_place(segments)[1]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return torch.arange(sizes.tokens).repeat(sizes.segments, 1)
