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
        all_of = tiles.is_patch.sum(1)
        budget = tokens.budget.clamp(max=all_of)
        size = tiles.sizes[:, : tiles.num_tiles]
        there = (size > 0) & (torch.arange(tiles.num_tiles, device=size.device) > 0)  # the first is the thumbnail
        importance = tiles.sum_by(tiling.covers, logits)[:, : tiles.num_tiles].masked_fill(~there, -torch.inf)
        power = ((importance - importance.amax(1, keepdim=True)) / self.temperature).exp().nan_to_num(nan=0.0)
        part = power / (power.sum(1, keepdim=True) + 1e-8)
        mean = 1 / there.sum(1, keepdim=True).clamp(min=1).float()
        # The share that is asked for would be a factor of all; no tile gets more than all of it.
        tiles = tiles.share_budget(tiling, size[:, 0] * budget // all_of.clamp(min=1), (1 + part - mean) * size)

        whole = upsample_thumbnail(logits, tiling, tokens.patches)
        score = _normalize_by_tile(tiles, logits) + _normalize_by_tile(tiles, whole)
        score = torch.where((tiling.height[:, None] > 0) & (tiles.index > 0), score, logits)
        return Selection(tiles.top(score, tiles.num_kept), counts=tokens.keep)


def upsample_thumbnail(values: Tensor, tiling: Tiling, patches: Patches) -> Tensor:
    """float32 `[S, N]`: for each token of a tile the thumbnail's `values` (`[S, N]`) at its place in the image, as the
    thumbnail is resized bilinearly to the map of all tiles; anything for others."""
    rows, width = values.shape
    thumbnail = tiling.covers > 0

    def side(sizes: Tensor) -> Tensor:
        return torch.where(thumbnail, sizes, 1).amax(1, keepdim=True)

    high, wide = side(patches.height), side(patches.width)
    spot = torch.where(thumbnail, patches.row * wide + patches.column, width)  # what is no part of it after the end
    dense = values.new_zeros(rows, width + 1).scatter(1, spot, values)

    def ends(place: Tensor, size: Tensor, to: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        exact = ((place.float() + 0.5) * (size.float() / to.clamp(min=1)[:, None]) - 0.5).clamp(min=0)
        low = torch.minimum(exact.floor().long(), size - 1)
        return low, torch.minimum(low + 1, size - 1), (exact - low).clamp(max=1)

    top, bottom, down = ends(tiling.row, high, tiling.height)
    left, right, over = ends(tiling.column, wide, tiling.width)

    def at(row: Tensor, column: Tensor) -> Tensor:
        return dense.gather(1, (row * wide + column).clamp(max=width))

    above = at(top, left) * (1 - over) + at(top, right) * over
    below = at(bottom, left) * (1 - over) + at(bottom, right) * over
    return above * (1 - down) + below * down


def _normalize_by_tile(tiles: Tiles, values: Tensor) -> Tensor:
    """float32 `[S, N]`: `values` divided by their length over each tile."""
    length = tiles.sum_by(tiles.index, values.square()).sqrt().clamp(min=1e-12)
    return (values / length.gather(1, tiles.index)).float()
