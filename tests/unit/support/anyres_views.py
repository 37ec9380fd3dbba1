# SPDX-License-Identifier: Apache-2.0
"""Made-up visual tokens of tiled images in LLaVA-NeXT's layout: a thumbnail, then the map of all tiles without its
padding, with a newline after each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenprune.selection.observables.tiling import Tiling
from tokenprune.selection.segments import Patches
from tokenprune.selection.tokens import VisualTokens
from tokenprune.testing import visual_tokens

Cell = tuple[int, int, int]  # tile, row, column; tile -1 is a newline


@dataclass(frozen=True)
class Picture:
    """An image of `down` x `across` tiles with `side` x `side` patches each. The map has `above` padding rows at the
    top and bottom and `beside` padding columns at the left and right. Without tiles: the thumbnail and a newline."""

    down: int = 0
    across: int = 0
    side: int = 4
    above: int = 0
    beside: int = 0

    @property
    def tiles(self) -> int:
        return self.down * self.across

    @property
    def cells(self) -> list[Cell]:
        """Return the (tile, row, column) of each token in order."""
        side = self.side
        cells = [(0, row, column) for row in range(side) for column in range(side)]
        for y in range(self.above, self.down * side - self.above):
            for x in range(self.beside, self.across * side - self.beside):
                cells.append((1 + y // side * self.across + x // side, y % side, x % side))
            cells.append((-1, 0, 0))
        return cells if self.tiles else [*cells, (-1, 0, 0)]

    def block(self, row: int, column: int) -> int:
        """Return the index of the tile that covers a thumbnail cell."""
        high, wide = self.side // self.down, self.side // self.across
        return 1 + min(row // high, self.down - 1) * self.across + min(column // wide, self.across - 1)


# Each shape; padding that makes tiles unequal; sides that do not divide; no tiles.
PICTURES = [
    Picture(2, 2), Picture(1, 2), Picture(2, 1, above=1), Picture(1, 3, beside=2), Picture(3, 1, side=5, above=3),
    Picture(2, 3, side=7, beside=1), Picture(),
]  # fmt: skip


def views(
    pictures: Sequence[Picture],
    keep: Sequence[int],
    *,
    seed: int = 0,
    heads: int = 2,
    ties: bool = False,
    **replaced: Any,
) -> VisualTokens:
    """Return one picture per row. ties: draw scores from few values. replaced: observables that replace the random
    ones."""
    g = torch.Generator().manual_seed(seed)
    cells = [picture.cells for picture in pictures]
    counts = [len(image_cells) for image_cells in cells]
    table = torch.full((len(cells), max(counts), 3), -1)
    for row, image_cells in enumerate(cells):
        table[row, : len(image_cells)] = torch.tensor(image_cells)
    tile, rows, columns = table.unbind(-1)
    side = torch.tensor([picture.side for picture in pictures])[:, None].expand_as(tile)
    patches = Patches(tile, rows.clamp(min=0), columns.clamp(min=0), side, side, torch.ones_like(side),
                      tiles=1 + max(picture.tiles for picture in pictures))  # fmt: skip
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]

    def scores(signed: bool = False) -> torch.Tensor:
        values = torch.rand(len(cells), heads, max(counts), generator=g) * (1 + signed) - signed / 2
        return ((values * 3).round() / 4 if ties else values).masked_fill((tile < 0)[:, None], 0)

    observables = {
        "encoder_attention": {0: scores(), -1: scores()},
        "encoder_logits": {-1: scores(signed=True)},
        "patches": patches,
        "tiling": Tiling.from_patches(patches, mask),
    } | replaced
    hidden = torch.randn(len(cells), max(counts), 8, generator=g)
    return visual_tokens(hidden, counts, keep=list(keep), **observables)


def split(weights: Sequence[Any], rooms: Sequence[int], total: int) -> list[int]:
    """Split a budget by weights. Capacity that an item cannot use goes to the others; remainders go to the largest
    fractions, first items first."""
    saturated: set[int] = set()
    while True:
        unsaturated = [t for t in range(len(rooms)) if t not in saturated]
        remaining, mass = total - sum(rooms[t] for t in saturated), sum(weights[t] for t in unsaturated)
        exact = {t: remaining * weights[t] / mass if mass else remaining / len(unsaturated) for t in unsaturated}
        over = {t for t in unsaturated if exact[t] > rooms[t]}
        if not over:
            break
        saturated |= over
    shares = [rooms[t] if t in saturated else int(exact[t] + 1e-9) for t in range(len(rooms))]
    order = sorted(
        (t for t in unsaturated if shares[t] < rooms[t]), key=lambda t: (-round(float(exact[t] - shares[t]), 9), t)
    )
    for t in order[: total - sum(shares)]:
        shares[t] += 1
    return shares
