# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos


@register("uniform", site=Site.PRE_LLM, paper="none (baseline)")
@dataclass(frozen=True)
class Uniform(Pruner):
    """Keep visual tokens spread evenly over rows and columns: a baseline that covers the whole image.

    Where the grid of an image is known, its tokens are kept in rows at even distances, with as many in each, at even
    distances too; the frames of a video share alike. Where it is not known, tokens are kept at even distances in raster
    order.
    """

    def select(self, tokens: VisualTokens) -> Selection:
        # Counts and grids are on the host, so the choice is made there, and the device is asked nothing.
        keep = torch.zeros(tokens.mask.shape, dtype=torch.bool, device="cpu")
        for segment, (count, number, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            keep[segment, spread_over_grid(count, number, grid)] = True
        return Selection(to_device(keep, tokens.mask.device), counts=tokens.keep)


def spread_over_grid(count: int, keep: int, grid: tuple[int, int, int] | None) -> list[int]:
    """Return `keep` indices, ascending, that are spread evenly over `count` tokens. grid: (frames, height, width)."""
    frames, height, width = grid or (1, 1, count)
    kept = []
    for frame, of_frame in Counter(sample_evenly(frames, keep)).items():
        # As far apart down as across, unless that takes more rows, or tokens in a row, than there are.
        rows = max(math.ceil(math.sqrt(of_frame * height / width) - 0.5), -(-of_frame // width))
        rows = min(rows, height, of_frame)
        in_rows = Counter(sample_evenly(rows, of_frame)).values()
        for row, number in zip(sample_evenly(height, rows), in_rows, strict=True):
            kept += [(frame * height + row) * width + column for column in sample_evenly(width, number)]
    return kept


def sample_evenly(length: int, number: int) -> list[int]:
    """Return the middles of `number` equal stretches of `range(length)`, ascending; in whole numbers, so exact."""
    return [(2 * index + 1) * length // (2 * number) for index in range(number)]


def spread_in_frames(videos: Videos, numbers: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return bool `[V, F, P]`: tokens spread evenly over each frame. numbers: how many of each frame of each video;
    frames after them keep none."""
    places = [
        [spread_over_grid(size, number, grid) for size, number in zip(sizes, of_video, strict=False)]
        for sizes, of_video, grid in zip(videos.frames, numbers, videos.grids, strict=True)
    ]
    return videos.at(places)
