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
    """Give each tile of an image its part of the budget by how much of the thumbnail's content it shows, and keep what
    the class token attends to most (HiRED).

    The thumbnail gets `alpha` of an image's budget. Of its patches the share 1 - `alpha` is marked to which the class
    token attends most in the tower's first block; tiles share the rest of the budget in proportion to the marks in
    their part of the thumbnail, and a tile without any may keep nothing. In each, the last block that the model reads
    decides. An image without tiles keeps the best of all its patches.

    alpha: float in [0, 1], the thumbnail's share of the budget.
    mode: "blocks" counts the marks in the part of the thumbnail that a tile shows; "bands" in one of as many runs of
    equal length in raster order, as the authors' code does.

    Source: Arif et al., "HiRED: Attention-Guided Token Dropping for Efficient Inference of High-Resolution
    Vision-Language Models", by its abstract and the authors' code for LLaVA-NeXT; the paper's text was not read.

    Differs from the paper: the number is exact (the code rounds tiles down), and what a tile has no room for goes to
    the others by their marks; only patches of the image are chosen from, not those of its padding; newline tokens go
    first (the code has none); a tower without a class token gives the attention that a patch receives on average;
    frames of a video share a budget evenly; tokens keep their positions.
    """

    encoder_layers: ClassVar[tuple[int, ...]] = (0, -1)

    alpha: Annotated[float, Ge(0), Le(1)] = 0.5
    mode: Literal["blocks", "bands"] = "blocks"

    def select(self, tokens: VisualTokens) -> Selection:
        tiling, tiles = tokens.tiling, Tiles.from_tokens(tokens)
        thumbnail = tiling.covers > 0
        size = thumbnail.sum(1)
        number = (size.double() * (1 - self.alpha)).long()
        marked = top_mask(compute_patch_attention(tokens, 0), thumbnail, number, thumbnail.shape[1])
        part = tiling.covers
        if self.mode == "bands":
            last = torch.where(part > 0, 0, tiles.index).masked_fill(tiles.index >= tiles.num_tiles, 0).amax(1)  # tile
            run = (thumbnail.cumsum(1) - 1) * last[:, None] // size.clamp(min=1)[:, None] + 1
            part = torch.where(thumbnail, run, 0)
        marks = tiles.sum_by(part, marked)[:, : tiles.num_tiles]
        tiles = tiles.share_budget(tiling, (tokens.budget.double() * self.alpha).long(), marks)
        return Selection(tiles.top(compute_patch_attention(tokens), tiles.num_kept), counts=tokens.keep)
