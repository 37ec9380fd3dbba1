# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.errors import TokenPruneError
from tokenprune.observable import Observable, Sizes, Where
from tokenprune.observable_registry import register_observable
from tokenprune.tokens import Segments, TokenSource
from tokenprune.transfer import sent


@register_observable("frames")
class Frames(Observable):
    """Lists of int, on the host: how many tokens each frame of each segment has; an image is one frame. A method that
    needs them is refused for budgets that images share, or frames have for themselves."""

    where = Where.CUT
    axes = ""
    of_frames = True

    def of_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> list[list[int]]:
        return frames_of(segments)

    def example(self, sizes: Sizes, generator: torch.Generator) -> list[list[int]]:
        return [[count] for count in sizes.counts]


def frames_of(segments: Segments) -> list[list[int]]:
    """Return how many tokens each frame of each segment has; raise TokenPruneError where that is not known."""
    frames = segments.frames or [None] * len(segments)
    if None in frames:
        raise TokenPruneError(
            'the frames of a video are not known here: a method that reads them says "frames" in its needs, and acts '
            "before tokens are removed"
        )
    return frames


def frame_and_place(segments: Segments) -> Tensor:
    """Return long `[2, S, N]`; made on the host, so that the device is not asked."""
    made = torch.full((2, *segments.mask.shape), -1)
    for segment, counts in enumerate(frames_of(segments)):
        length = torch.tensor(counts)
        frame = torch.arange(len(counts)).repeat_interleave(length)
        start = (length.cumsum(0) - length).repeat_interleave(length)
        made[0, segment, : len(frame)] = frame
        made[1, segment, : len(frame)] = torch.arange(len(frame)) - start
    return sent(made, segments.mask.device)
