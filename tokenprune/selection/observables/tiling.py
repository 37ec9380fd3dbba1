# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenprune.models.families import Family
from tokenprune.selection.observable import Backend, Observable, ObservedAt
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import Patches, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """The thumbnail of an image and its tiles, row by row, which make one map of the image; see `Patches`.

    covers: long `[S, N]`, for a token of the thumbnail the tile that shows its part of the image: the thumbnail is cut
            into as many equal blocks as there are tiles, the last ones take what does not divide. 0 for all others.
    row, column: long `[S, N]`, of a tile's token its place in the map that the tiles make, padding left out.
    height, width: long `[S]`, the size of that map. 0, as all of the above, of an image that is not cut into tiles.
    """

    covers: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor

    @staticmethod
    def from_patches(patches: Patches, mask: Tensor) -> Tiling:
        """Return how `patches` lie; mask: bool `[S, N]`, False for padding.

        Told from their order: tile 0 is the thumbnail, rows of the map follow, and a newline ends each of them. So
        frames of a video, and tiles that stand side by side without one, are no map.
        """
        tile = patches.tile.masked_fill(~mask, -1)
        inside = tile > 0
        before = inside.long().cumsum(1)  # tokens of tiles up to here
        count = before[:, -1:]
        newline = (tile < 0) & mask & (before > 0)
        width = torch.where(newline, before, count).amin(1, keepdim=True).clamp(min=1)

        def at(place: Tensor, values: Tensor) -> Tensor:
            return (values * (inside & (before == place))).sum(1, keepdim=True)

        one = torch.ones_like(count)
        across = at(width, tile) - at(one, tile) + 1  # tiles side by side; one that is padding alone is none
        down = tile.amax(1, keepdim=True) // across.clamp(min=1)
        fits = (count > 0) & (count % width == 0) & (width <= across * at(one, patches.width))
        thumbnail = (tile == 0) & fits
        fits = fits & thumbnail.any(1, keepdim=True)
        block = _block(patches.row, patches.height, down) * across + _block(patches.column, patches.width, across) + 1
        place = (before - 1).clamp(min=0)
        return Tiling(
            torch.where(thumbnail, torch.minimum(block, tile.amax(1, keepdim=True)), 0),
            torch.where(inside & fits, place // width, 0),
            torch.where(inside & fits, place % width, 0),
            torch.where(fits, count // width, 0).squeeze(1),
            torch.where(fits, width, 0).squeeze(1),
        )


def _block(place: Tensor, size: Tensor, number: Tensor) -> Tensor:
    """Return which of `number` blocks of a side of `size` places each place is in."""
    number = number.clamp(min=1)
    return torch.minimum(place // (size // number).clamp(min=1), number - 1)


@register_observable("tiling")
class TileMap(Observable):
    """`Tiling`: how the tiles of each image lie, and which part of its thumbnail each of them shows.

    On families that show a thumbnail first and then tiles (LLaVA-NeXT, LLaVA-OneVision), and on those whose every image
    is one square tile.
    """

    where = ObservedAt.TOWER
    axes = ""
    backends = frozenset({Backend.HF, Backend.VLLM})

    def find_obstacle(self, row: Family) -> str | None:
        alone = row.patches == "tiles" and row.square == "always"
        if row.patches == "packed" or alone:
            return None
        return "a thumbnail ahead of the tiles of an image"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tiling:
        return Tiling.from_patches(source.patches(segments), segments.mask)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tiling:
        """One tile each."""
        none = torch.zeros(sizes.segments, sizes.tokens, dtype=torch.long, device="cpu")
        return Tiling(none, none, none, none[:, 0], none[:, 0])
