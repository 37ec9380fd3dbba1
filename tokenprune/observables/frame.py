# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.observable import Observable, Sizes, Where
from tokenprune.observable_registry import register_observable
from tokenprune.observables.frames import frame_and_place
from tokenprune.tokens import Segments, TokenSource


@register_observable("frame")
class Frame(Observable):
    """long `[S, N]`: index of each token's frame in its segment; -1 for what is in no frame (a newline behind a video,
    padding)."""

    where = Where.CUT
    axes = "SN"
    of_frames = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        return frame_and_place(segments)[0]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return torch.zeros(sizes.segments, sizes.tokens, dtype=torch.long)
