# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING

from tokenprune.errors import TokenPruneError
from tokenprune.view.observable import Backend, Observable, ObservedAt
from tokenprune.view.registry import observables_of, register_observable
from tokenprune.view.segments import Segments, Sizes
from tokenprune.view.source import TokenSource

if TYPE_CHECKING:
    import torch


class OfFrames(Observable):
    """Base of what is known of the frames of videos; whoever declares one may read all."""

    where = ObservedAt.FRAMES
    backends = frozenset({Backend.HF, Backend.VLLM})

    def declared(self, needs: frozenset[str]) -> bool:
        return bool(observables_of(needs, ObservedAt.FRAMES))


@register_observable("frames")
class FrameSizes(OfFrames):
    """S lists of ints, on the host: how many tokens each frame of each segment has. An image is one frame; tokens
    behind the last frame of a video (a newline) are in none."""

    axes = ""

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> list[list[int]]:
        frames = [one for one in segments.frames if one is not None]
        if len(frames) != len(segments):
            raise TokenPruneError("the frames of a video are not known here, or tokens of it are gone already")
        return frames

    def example(self, sizes: Sizes, generator: torch.Generator) -> list[list[int]]:
        """Two frames each, as far as the tokens are even."""
        return [[count // 2] * 2 if count > 1 else [count] for count in sizes.counts]
