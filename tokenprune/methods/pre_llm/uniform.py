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

    On a known grid, tokens are kept in evenly spaced rows and at even distances within each row. Frames of a video
    share the budget evenly. Without a known grid, tokens are kept at even distances in raster order.

    Examples:
        >>> model = tokenprune.patch(model, Uniform(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    def select(self, tokens: VisualTokens) -> Selection:
        # Counts and grids are on the host, so the choice avoids synchronizing with the device.
        keep = torch.zeros(tokens.mask.shape, dtype=torch.bool, device="cpu")
        for segment, (count, num_kept, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            keep[segment, spread_over_grid(count, num_kept, grid)] = True
        return Selection(to_device(keep, tokens.mask.device), counts=tokens.keep)


def spread_over_grid(count: int, num_kept: int, grid: tuple[int, int, int] | None) -> list[int]:
    """Return `num_kept` ascending indices that are spread evenly over `count` tokens.

    Args:
        count: Number of tokens.
        num_kept: Number of indices.
        grid: Frames, height and width, or None for raster order.
    """
    frames, height, width = grid or (1, 1, count)
    indices = []
    for frame, num_in_frame in Counter(sample_evenly(frames, num_kept)).items():
        # Distances along rows and columns are equal, within the height and width of the grid.
        num_rows = max(math.ceil(math.sqrt(num_in_frame * height / width) - 0.5), -(-num_in_frame // width))
        num_rows = min(num_rows, height, num_in_frame)
        num_per_row = Counter(sample_evenly(num_rows, num_in_frame)).values()
        for row, num_in_row in zip(sample_evenly(height, num_rows), num_per_row, strict=True):
            indices += [(frame * height + row) * width + column for column in sample_evenly(width, num_in_row)]
    return indices


def sample_evenly(length: int, count: int) -> list[int]:
    """Return the middles of `count` equal parts of `range(length)`, in exact integer arithmetic."""
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def spread_in_frames(videos: Videos, num_kept_per_frame: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return tokens that are spread evenly over each frame, bool (V, F, P).

    Args:
        videos: Frames of the visual tokens.
        num_kept_per_frame: Number of kept tokens of each frame of each video. Missing frames keep none.
    """
    indices = [
        [spread_over_grid(size, num_kept, grid) for size, num_kept in zip(sizes, num_of_video, strict=False)]
        for sizes, num_of_video, grid in zip(videos.frames, num_kept_per_frame, videos.grids, strict=True)
    ]
    return videos.mask_from_indices(indices)
