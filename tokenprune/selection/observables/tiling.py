# SPDX-License-Identifier: Apache-2.0
"""Observable of the tiles of an image and of its thumbnail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenprune.models.families import Family
from tokenprune.selection.observable import Backend, Input, Observable, ObservedAt
from tokenprune.selection.observable_registry import register_observable
from tokenprune.selection.segments import Patches, Segments, Sizes
from tokenprune.selection.source import TokenSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tiling:
    """Layout of an image as a thumbnail, followed by tiles that form one map of the image. See `Patches`.

    All values are 0 for an image without tiles.

    Args:
        covers: Index of the tile that shows the same part of the image as a thumbnail token, shape (S, N), int64. The
            thumbnail is divided into one equal block per tile. The last blocks include any remainder. 0 for other
            tokens.
        row: Row of a tile token in the map of all tiles, without padding, shape (S, N), int64.
        column: Column of a tile token in the map of all tiles, shape (S, N), int64.
        height: Height of the map, shape (S,), int64.
        width: Width of the map, shape (S,), int64.
    """

    covers: Tensor
    row: Tensor
    column: Tensor
    height: Tensor
    width: Tensor

    @staticmethod
    def from_patches(patches: Patches, mask: Tensor) -> Tiling:
        """Infer the layout from the order of the tokens.

        Tile 0 is the thumbnail. The rows of the map follow, each with a newline token at its end. Video frames, and
        tiles without newlines, do not form a map.

        Args:
            patches: Location of each token in the vision tower.
            mask: Mask of tokens, shape (S, N), bool.
        """
        tile = patches.tile.masked_fill(~mask, -1)
        inside = tile > 0
        num_before = inside.long().cumsum(1)  # number of tile tokens up to and including each token
        count = num_before[:, -1:]
        is_newline = (tile < 0) & mask & (num_before > 0)
        width = torch.where(is_newline, num_before, count).amin(1, keepdim=True).clamp(min=1)

        def get_nth(n: Tensor, values: Tensor) -> Tensor:
            """Return the value of the n-th tile token (from 1) of each segment."""
            return (values * (inside & (num_before == n))).sum(1, keepdim=True)

        first = torch.ones_like(count)
        # Tiles per row of the map. Tiles that consist only of padding are not counted.
        across = get_nth(width, tile) - get_nth(first, tile) + 1
        down = tile.amax(1, keepdim=True) // across.clamp(min=1)
        is_map = (count > 0) & (count % width == 0) & (width <= across * get_nth(first, patches.width))
        thumbnail = (tile == 0) & is_map
        is_map = is_map & thumbnail.any(1, keepdim=True)
        block = (
            _find_block(patches.row, patches.height, down) * across
            + _find_block(patches.column, patches.width, across)
            + 1
        )
        index = (num_before - 1).clamp(min=0)
        return Tiling(
            torch.where(thumbnail, torch.minimum(block, tile.amax(1, keepdim=True)), 0),
            torch.where(inside & is_map, index // width, 0),
            torch.where(inside & is_map, index % width, 0),
            torch.where(is_map, count // width, 0).squeeze(1),
            torch.where(is_map, width, 0).squeeze(1),
        )


def _find_block(index: Tensor, size: Tensor, num_blocks: Tensor) -> Tensor:
    """Return the block of each index if an axis of `size` is divided into `num_blocks` blocks."""
    num_blocks = num_blocks.clamp(min=1)
    return torch.minimum(index // (size // num_blocks).clamp(min=1), num_blocks - 1)


@register_observable("tiling")
class TileMap(Observable):
    """Layout of the tiles of each image, and the tile that each thumbnail token covers, as `Tiling`.

    Available for families with a thumbnail before the tiles (LLaVA-NeXT, LLaVA-OneVision), and for families with one
    square tile per image.
    """

    where = ObservedAt.TOWER
    axes = ""
    backends = frozenset({Backend.HF, Backend.VLLM})
    from_input = Input.FEATURES

    def find_obstacle(self, row: Family) -> str | None:
        is_single_tile = row.patches == "tiles" and row.square == "always"
        if row.patches == "packed" or is_single_tile:
            return None
        return "a thumbnail ahead of the tiles of an image"

    def compute_visual(self, source: TokenSource, segments: Segments, *layer: int | float) -> Tiling:
        return Tiling.from_patches(source.patches(segments), segments.mask)

    def example(self, sizes: Sizes, generator: torch.Generator) -> Tiling:
        """Return images without tiles."""
        zeros = torch.zeros(sizes.segments, sizes.tokens, dtype=torch.long, device="cpu")
        return Tiling(zeros, zeros, zeros, zeros[:, 0], zeros[:, 0])
