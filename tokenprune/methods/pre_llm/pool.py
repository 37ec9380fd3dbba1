# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("pool", site=Site.PRE_LLM, paper="none (baseline)", merges=True)
@dataclass(frozen=True)
class Pool(Pruner):
    """Average neighboring visual tokens: a low-pass baseline that loses only small details.

    Each image is divided into as many rectangles of nearly equal size as it may keep tokens. The token nearest to the
    center of a rectangle becomes the mean of the rectangle and keeps its position. Without a full grid (newline tokens,
    unknown shape), runs in raster order replace the rectangles.

    Examples:
        >>> model = tokenprune.patch(model, Pool(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    def select(self, tokens: VisualTokens) -> Selection:
        size = tokens.mask.shape
        keep, assign = torch.zeros(size, dtype=torch.bool, device="cpu"), torch.full(size, -1, device="cpu")
        for segment, (count, budget, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            cell, middle = split_into_rectangles(count, budget, grid)
            keep[segment, middle] = True
            assign[segment, :count] = middle[cell]
        device = tokens.mask.device
        return Selection(to_device(keep, device), to_device(assign, device), counts=tokens.keep)


def split_into_rectangles(
    count: int, cells: int, grid: tuple[int, int, int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a grid into `cells` rectangles.

    The rows are split into bands of about equal height, and each band into its share of the cells. Frames of a video
    are stacked as rows.

    Args:
        count: Number of tokens.
        cells: Number of rectangles.
        grid: Frames, height and width, or None for one row of tokens.

    Returns:
        The cell of each token, long (count,), and the middle token of each cell, long (cells,).
    """
    height, width = (grid[0] * grid[1], grid[2]) if grid is not None else (1, count)
    bands = max(1, min(height, round((cells * height / width) ** 0.5)))
    # A band holds between 1 and `width` cells.
    bands = min(max(bands, -(-cells // width)), cells)
    cell = torch.empty(height, width, dtype=torch.long, device="cpu")
    middle = torch.empty(cells, dtype=torch.long, device="cpu")
    num_done = 0
    for band in range(bands):
        top, bottom = band * height // bands, (band + 1) * height // bands
        num_in_band = (band + 1) * cells // bands - num_done
        cell[top:bottom] = num_done + torch.arange(width, device="cpu") * num_in_band // width
        starts = -(-torch.arange(num_in_band + 1, device="cpu") * width // num_in_band)  # first column of each cell
        middle[num_done : num_done + num_in_band] = (top + bottom) // 2 * width + starts[:-1] + starts.diff() // 2
        num_done += num_in_band
    return cell.flatten(), middle
