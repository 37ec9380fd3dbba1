# SPDX-License-Identifier: Apache-2.0
"""Made-up visual tokens of images that are cut into tiles, as LLaVA-NeXT lays them out: a thumbnail, then the map of
all tiles without its padding, a newline behind each row."""

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
    """An image in `down` x `across` tiles of `side` x `side` patches, of whose map `above` rows at either end, and
    `beside` columns, are padding. No tiles: the thumbnail alone, and a newline behind it."""

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
        """What each token is, in order."""
        side = self.side
        found = [(0, row, column) for row in range(side) for column in range(side)]
        for y in range(self.above, self.down * side - self.above):
            for x in range(self.beside, self.across * side - self.beside):
                found.append((1 + y // side * self.across + x // side, y % side, x % side))
            found.append((-1, 0, 0))
        return found if self.tiles else [*found, (-1, 0, 0)]

    def block(self, row: int, column: int) -> int:
        """The tile whose part of the thumbnail a cell of it is in."""
        high, wide = self.side // self.down, self.side // self.across
        return 1 + min(row // high, self.down - 1) * self.across + min(column // wide, self.across - 1)


# One of each shape; padding above or beside, so that tiles are not of one size; what does not divide; no tiles.
PICTURES = [
    Picture(2, 2), Picture(1, 2), Picture(2, 1, above=1), Picture(1, 3, beside=2), Picture(3, 1, side=5, above=3),
    Picture(2, 3, side=7, beside=1), Picture(),
]  # fmt: skip


def views(
    pictures: Sequence[Picture], keep: Sequence[int], *, seed: int = 0, heads: int = 2, ties: bool = False, **given: Any
) -> VisualTokens:
    """One picture a row. ties: few values, which many share. given: observables in place of random ones."""
    g = torch.Generator().manual_seed(seed)
    cells = [one.cells for one in pictures]
    counts = [len(one) for one in cells]
    places = torch.full((len(cells), max(counts), 3), -1)
    for row, one in enumerate(cells):
        places[row, : len(one)] = torch.tensor(one)
    tile, across, down = places.unbind(-1)
    side = torch.tensor([one.side for one in pictures])[:, None].expand_as(tile)
    patches = Patches(tile, across.clamp(min=0), down.clamp(min=0), side, side, torch.ones_like(side),
                      tiles=1 + max(one.tiles for one in pictures))  # fmt: skip
    mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]

    def scores(signed: bool = False) -> torch.Tensor:
        found = torch.rand(len(cells), heads, max(counts), generator=g) * (1 + signed) - signed / 2
        return ((found * 3).round() / 4 if ties else found).masked_fill((tile < 0)[:, None], 0)

    seen = {
        "encoder_attention": {0: scores(), -1: scores()},
        "encoder_logits": {-1: scores(signed=True)},
        "patches": patches,
        "tiling": Tiling.from_patches(patches, mask),
    } | given
    hidden = torch.randn(len(cells), max(counts), 8, generator=g)
    return visual_tokens(hidden, counts, keep=list(keep), **seen)


def split(weights: Sequence[Any], rooms: Sequence[int], total: int) -> list[int]:
    """Split a budget by weights: what one has no room for goes to the others, what does not divide to the largest
    fractions, of equal ones the first."""
    full: set[int] = set()
    while True:
        rest = [t for t in range(len(rooms)) if t not in full]
        left, mass = total - sum(rooms[t] for t in full), sum(weights[t] for t in rest)
        exact = {t: left * weights[t] / mass if mass else left / len(rest) for t in rest}
        over = {t for t in rest if exact[t] > rooms[t]}
        if not over:
            break
        full |= over
    got = [rooms[t] if t in full else int(exact[t] + 1e-9) for t in range(len(rooms))]
    order = sorted((t for t in rest if got[t] < rooms[t]), key=lambda t: (-round(float(exact[t] - got[t]), 9), t))
    for t in order[: total - sum(got)]:
        got[t] += 1
    return got
