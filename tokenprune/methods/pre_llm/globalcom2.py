# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Gt

from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.observables.tiling import Tiling
from tokenprune.selection.tokens import VisualTokens

if TYPE_CHECKING:
    from torch import Tensor

    from tokenprune.selection.segments import Patches


@register("globalcom2", site=Site.PRE_LLM, needs=("encoder_logits", "tiling"), paper="arXiv 2501.05179, AAAI 2026")
@dataclass(frozen=True)
class GlobalCom2(Pruner):
    """Let the thumbnail of an image say how much each tile keeps, and help to choose what (GlobalCom2).

    The measure is the class token's logit of each patch, in the last block that the model reads. Of the thumbnail the
    share that is asked for stays, by that. A tile's share is the same times 1 + p - the mean of p, at most all of it,
    where p is the softmax over tiles of the sum of logits in their parts of the thumbnail. In a tile, the score is its
    own logits and those of the thumbnail at the same place (bilinear), each divided by its length over the tile.

    temperature: of that softmax, at least 0.

    Source: Liu et al., "Global Compression Commander: Plug-and-Play Inference Acceleration for High-Resolution Large
    Vision-Language Models", by the authors' code for LLaVA-NeXT; the paper's text was not read.

    Differs from the paper: the number is exact (the code rounds tiles down); logits are those of the block whose output
    the model reads, where the code takes the one after it; the thumbnail keeps its raster order; newline tokens go
    first (the code keeps all); a tower without a class token gives the mean of all patches' logits; every image is for
    itself (the code hands the second one the first one's scores); frames of a video share a budget evenly; tokens keep
    their positions.
    """

    temperature: Annotated[float, Gt(0)] = 10.0

    def select(self, tokens: VisualTokens) -> Selection:
        logits, tiling, tiles = tokens.encoder_logits(-1).float().mean(1), tokens.tiling, Tiles.from_tokens(tokens)
        num_patches = tiles.is_patch.sum(1)
        budget = tokens.budget.clamp(max=num_patches)
        tile_size = tiles.sizes[:, : tiles.num_tiles]
        is_tile = (tile_size > 0) & (
            torch.arange(tiles.num_tiles, device=tile_size.device) > 0
        )  # the first is the thumbnail
        importance = tiles.sum_by(tiling.covers, logits)[:, : tiles.num_tiles].masked_fill(~is_tile, -torch.inf)
        power = ((importance - importance.amax(1, keepdim=True)) / self.temperature).exp().nan_to_num(nan=0.0)
        share = power / (power.sum(1, keepdim=True) + 1e-8)
        mean_share = 1 / is_tile.sum(1, keepdim=True).clamp(min=1).float()
        # The share that is asked for would be a factor of all; no tile gets more than all of it.
        tiles = tiles.share_budget(
            tiling, tile_size[:, 0] * budget // num_patches.clamp(min=1), (1 + share - mean_share) * tile_size
        )

        thumbnail_logits = upsample_thumbnail(logits, tiling, tokens.patches)
        score = _normalize_by_tile(tiles, logits) + _normalize_by_tile(tiles, thumbnail_logits)
        score = torch.where((tiling.height[:, None] > 0) & (tiles.index > 0), score, logits)
        return Selection(tiles.top(score, tiles.num_kept), counts=tokens.keep)


def upsample_thumbnail(values: Tensor, tiling: Tiling, patches: Patches) -> Tensor:
    """float32 `[S, N]`: for each token of a tile the thumbnail's `values` (`[S, N]`) at its place in the image, as the
    thumbnail is resized bilinearly to the map of all tiles; anything for others."""
    rows, width = values.shape
    thumbnail = tiling.covers > 0

    def get_max_size(sizes: Tensor) -> Tensor:
        return torch.where(thumbnail, sizes, 1).amax(1, keepdim=True)

    thumbnail_height, thumbnail_width = get_max_size(patches.height), get_max_size(patches.width)
    flat_index = torch.where(
        thumbnail, patches.row * thumbnail_width + patches.column, width
    )  # what is no part of it after the end
    dense = values.new_zeros(rows, width + 1).scatter(1, flat_index, values)

    def interpolate_index(index: Tensor, size: Tensor, target_size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        source = ((index.float() + 0.5) * (size.float() / target_size.clamp(min=1)[:, None]) - 0.5).clamp(min=0)
        low = torch.minimum(source.floor().long(), size - 1)
        return low, torch.minimum(low + 1, size - 1), (source - low).clamp(max=1)

    top, bottom, down = interpolate_index(tiling.row, thumbnail_height, tiling.height)
    left, right, over = interpolate_index(tiling.column, thumbnail_width, tiling.width)

    def get_values(row: Tensor, column: Tensor) -> Tensor:
        return dense.gather(1, (row * thumbnail_width + column).clamp(max=width))

    above = get_values(top, left) * (1 - over) + get_values(top, right) * over
    below = get_values(bottom, left) * (1 - over) + get_values(bottom, right) * over
    return above * (1 - down) + below * down


def _normalize_by_tile(tiles: Tiles, values: Tensor) -> Tensor:
    """float32 `[S, N]`: `values` divided by their length over each tile."""
    length = tiles.sum_by(tiles.index, values.square()).sqrt().clamp(min=1e-12)
    return (values / length.gather(1, tiles.index)).float()
