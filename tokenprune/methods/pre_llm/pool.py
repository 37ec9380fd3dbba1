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
    """Average neighbouring visual tokens: a low-pass baseline that loses small things and nothing else.

    An image of h x w tokens is cut into exactly as many rectangles as it may keep tokens, of sizes as equal as can be;
    the token nearest to a rectangle's middle becomes its mean and keeps its own position. Where the tokens are no full
    grid (newline tokens, unknown shape), stretches of the raster order take the place of rectangles.
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
    """Cut a grid into `cells` rectangles; returns each token's cell (long `[count]`) and each cell's middle token.

    The rows are cut into bands of about equal height, and each band into its share of the cells. Frames of a video are
    rows.
    """
    height, width = (grid[0] * grid[1], grid[2]) if grid is not None else (1, count)
    bands = max(1, min(height, round((cells * height / width) ** 0.5)))
    # A band holds at most `width` cells, and at least one.
    bands = min(max(bands, -(-cells // width)), cells)
    cell = torch.empty(height, width, dtype=torch.long, device="cpu")
    middle = torch.empty(cells, dtype=torch.long, device="cpu")
    done = 0
    for band in range(bands):
        top, bottom = band * height // bands, (band + 1) * height // bands
        inside = (band + 1) * cells // bands - done
        cell[top:bottom] = done + torch.arange(width, device="cpu") * inside // width
        left = -(-torch.arange(inside + 1, device="cpu") * width // inside)  # where each cell of the band begins
        middle[done : done + inside] = (top + bottom) // 2 * width + left[:-1] + left.diff() // 2
        done += inside
    return cell.flatten(), middle
