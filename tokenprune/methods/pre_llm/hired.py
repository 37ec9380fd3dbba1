# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.take import top_mask
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("hired", site=Site.PRE_LLM, needs=("encoder_attention", "tiling"), paper="arXiv 2408.10945, AAAI 2025")
@dataclass(frozen=True)
class Hired(Pruner):
    """Split the budget over tiles by salient thumbnail content, then keep salient patches.

    The thumbnail gets `alpha` of an image's budget. A share of 1 - `alpha` of its patches, with the most class-token
    attention in the first tower block, is marked. Tiles share the rest of the budget in proportion to the marks in
    their region of the thumbnail, so a tile without marks may keep no token. Within each tile, patches are ranked by
    class-token attention in the last block that the model reads. An image without tiles keeps the best of all its
    patches.

    Args:
        alpha: Share of the budget for the thumbnail, in [0, 1].
        mode: "blocks" counts marks in the region that a tile shows. "bands" counts marks in consecutive runs of equal
            length in raster order, as the authors' code does.

    Source:
        Arif et al., "HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution Vision-Language
        Models" (arXiv 2408.10945), from the abstract and the authors' code for LLaVA-NeXT. The text of the paper was
        not read.

    Differences from the paper:
        - The number of kept tokens is exact. The authors' code rounds the tiles down. Budget that exceeds a tile's
          patches goes to the other tiles by their marks.
        - Patches of the padding are never kept.
        - Newline tokens are dropped first. The authors' code has no newlines.
        - In a tower without a class token, the attention of a patch is its mean over all queries.
        - Frames of a video have equal budgets.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, Hired(alpha=0.4), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    encoder_layers: ClassVar[tuple[int, ...]] = (0, -1)

    alpha: Annotated[float, Ge(0), Le(1)] = 0.5
    mode: Literal["blocks", "bands"] = "blocks"

    def select(self, tokens: VisualTokens) -> Selection:
        tiling, tiles = tokens.tiling, Tiles.from_tokens(tokens)
        thumbnail = tiling.covers > 0
        size = thumbnail.sum(1)
        num_marked = (size.double() * (1 - self.alpha)).long()
        marks = top_mask(compute_patch_attention(tokens, 0), thumbnail, num_marked, thumbnail.shape[1])
        tile_of_patch = tiling.covers
        if self.mode == "bands":
            num_tiles = torch.where(tile_of_patch > 0, 0, tiles.index)
            num_tiles = num_tiles.masked_fill(tiles.index >= tiles.num_tiles, 0).amax(1)
            band = (thumbnail.cumsum(1) - 1) * num_tiles[:, None] // size.clamp(min=1)[:, None] + 1
            tile_of_patch = torch.where(thumbnail, band, 0)
        marks = tiles.sum_by(tile_of_patch, marks)[:, : tiles.num_tiles]
        tiles = tiles.share_budget(tiling, (tokens.budget.double() * self.alpha).long(), marks)
        return Selection(tiles.top(compute_patch_attention(tokens), tiles.num_kept), counts=tokens.keep)
