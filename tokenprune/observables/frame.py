# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.observables.frames import FrameSizes, OfFrames
from tokenprune.view.frames import frame_and_place
from tokenprune.view.registry import register_observable
from tokenprune.view.segments import Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@register_observable("frame")
class Frame(OfFrames):
    """long `[S, N]`: index of each token's frame in its segment; -1 for what is in no frame (a newline behind a video,
    padding)."""

    axes = "SN"

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tensor:
        frames = FrameSizes().of_visual(source, segments)
        return frame_and_place(frames, segments.mask.shape[1], segments.mask.device)[0]

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tensor:
        return frame_and_place(FrameSizes().example(sizes, generator), sizes.tokens, torch.device("cpu"))[0]
