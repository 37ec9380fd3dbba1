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
    """Set the budget of each tile and rank its patches by the thumbnail.

    The score is the class token's attention logit of each patch in the last block that the model reads. The thumbnail
    keeps the requested share by this score. The share of a tile is multiplied by 1 + p - mean(p), where p is the
    softmax over tiles of the summed logits in the tile's region of the thumbnail. Within a tile, patches are ranked by
    their own logits plus the upsampled logits of the thumbnail, both divided by their norm over the tile.

    Args:
        temperature: Temperature of the softmax over tiles.

    Source:
        Liu et al., "Global Compression Commander: Plug-and-Play Inference Acceleration for High-Resolution Large
        Vision-Language Models" (arXiv 2501.05179), from the authors' code for LLaVA-NeXT. The text of the paper was not
        read.

    Differences from the paper:
        - The number of kept tokens is exact. The authors' code rounds the tiles down.
        - Logits are from the block whose output the model reads. The authors' code uses the block after it.
        - The thumbnail keeps its raster order.
        - Newline tokens are dropped first. The authors' code keeps all newlines.
        - In a tower without a class token, logits are the mean over all patches.
        - Each image uses its own scores. The authors' code reuses the first image's scores for the second.
        - Frames of a video have equal budgets.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, GlobalCom2(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    temperature: Annotated[float, Gt(0)] = 10.0

    def select(self, tokens: VisualTokens) -> Selection:
        logits, tiling, tiles = tokens.encoder_logits(-1).float().mean(1), tokens.tiling, Tiles.from_tokens(tokens)
        num_patches = tiles.is_patch.sum(1)
        budget = tokens.budget.clamp(max=num_patches)
        tile_size = tiles.sizes[:, : tiles.num_tiles]
        # Index 0 is the thumbnail.
        is_tile = (tile_size > 0) & (torch.arange(tiles.num_tiles, device=tile_size.device) > 0)
        importance = tiles.sum_by(tiling.covers, logits)[:, : tiles.num_tiles].masked_fill(~is_tile, -torch.inf)
        power = ((importance - importance.amax(1, keepdim=True)) / self.temperature).exp().nan_to_num(nan=0.0)
        share = power / (power.sum(1, keepdim=True) + 1e-8)
        mean_share = 1 / is_tile.sum(1, keepdim=True).clamp(min=1).float()
        # The requested share is a common factor of all tiles, so it can be omitted.
        tiles = tiles.share_budget(
            tiling, tile_size[:, 0] * budget // num_patches.clamp(min=1), (1 + share - mean_share) * tile_size
        )

        thumbnail_logits = upsample_thumbnail(logits, tiling, tokens.patches)
        score = _normalize_by_tile(tiles, logits) + _normalize_by_tile(tiles, thumbnail_logits)
        score = torch.where((tiling.height[:, None] > 0) & (tiles.index > 0), score, logits)
        return Selection(tiles.top(score, tiles.num_kept), counts=tokens.keep)


def upsample_thumbnail(values: Tensor, tiling: Tiling, patches: Patches) -> Tensor:
    """Return the thumbnail's value at the position of each tile token, bilinearly upsampled, float32 (S, N).

    The result of other tokens is arbitrary.

    Args:
        values: Value of each token, (S, N).
        tiling: Tiles and their grid.
        patches: Patches of the tokens.
    """
    rows, width = values.shape
    thumbnail = tiling.covers > 0

    def get_max_size(sizes: Tensor) -> Tensor:
        return torch.where(thumbnail, sizes, 1).amax(1, keepdim=True)

    thumbnail_height, thumbnail_width = get_max_size(patches.height), get_max_size(patches.width)
    # Other tokens are scattered to one extra element at the end.
    flat_index = torch.where(thumbnail, patches.row * thumbnail_width + patches.column, width)
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
    """Divide `values` by their norm over each tile, float32 (S, N)."""
    length = tiles.sum_by(tiles.index, values.square()).sqrt().clamp(min=1e-12)
    return (values / length.gather(1, tiles.index)).float()
