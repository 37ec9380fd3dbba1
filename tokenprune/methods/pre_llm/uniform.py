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
        for segment, (count, num_kept, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            keep[segment, spread_over_grid(count, num_kept, grid)] = True
        return Selection(to_device(keep, tokens.mask.device), counts=tokens.keep)


def spread_over_grid(count: int, num_kept: int, grid: tuple[int, int, int] | None) -> list[int]:
    """Return `keep` indices, ascending, that are spread evenly over `count` tokens. grid: (frames, height, width)."""
    frames, height, width = grid or (1, 1, count)
    indices = []
    for frame, num_in_frame in Counter(sample_evenly(frames, num_kept)).items():
        # As far apart down as across, unless that takes more rows, or tokens in a row, than there are.
        num_rows = max(math.ceil(math.sqrt(num_in_frame * height / width) - 0.5), -(-num_in_frame // width))
        num_rows = min(num_rows, height, num_in_frame)
        num_per_row = Counter(sample_evenly(num_rows, num_in_frame)).values()
        for row, num_in_row in zip(sample_evenly(height, num_rows), num_per_row, strict=True):
            indices += [(frame * height + row) * width + column for column in sample_evenly(width, num_in_row)]
    return indices


def sample_evenly(length: int, count: int) -> list[int]:
    """Return the middles of `number` equal stretches of `range(length)`, ascending; in whole numbers, so exact."""
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def spread_in_frames(videos: Videos, num_kept_per_frame: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return bool `[V, F, P]`: tokens spread evenly over each frame. numbers: how many of each frame of each video;
    frames after them keep none."""
    indices = [
        [spread_over_grid(size, num_kept, grid) for size, num_kept in zip(sizes, num_of_video, strict=False)]
        for sizes, num_of_video, grid in zip(videos.frames, num_kept_per_frame, videos.grids, strict=True)
    ]
    return videos.at(indices)
