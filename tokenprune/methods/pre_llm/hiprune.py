# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.compact import partition
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_WITH_NEIGHBOURS = 5  # tokens of a cross: an anchor, and what is above, below, left and right of it


@register(
    "hiprune",
    site=Site.PRE_LLM,
    needs=("encoder_received_attention",),
    paper="arXiv 2508.00553, ACL 2026 Findings",
)
@dataclass(frozen=True)
class HiPrune(Pruner):
    """Keep what a middle block of the vision tower attends to with its neighbours, and for the rest what the last block
    attends to (HiPrune).

    Of each tile (or frame), the anchors are the patches that receive most attention from all tokens in the object
    block, the buffers what is above, below, left and right of them, and the registers, as many as are left to keep,
    those of the others that receive most in the last block that the model reads.

    alpha: share in [0, 1] of the kept tokens that are anchors with their buffers.
    object_layer: the object block, an int (see `Pruner.encoder_layers`) or a share of the depth between 0 and 1. The
    default is block 8 of CLIP-L's 24 and block 15 of Qwen2.5-VL's 32, counted from 0, as in the authors' code.
    edges: "grid" knows the ends of rows and columns; "sequence" takes the four neighbours in the raster order, as the
    authors' code does: the last of a row has the first of the next one beside it, and what would be above the first row
    is the first token, below the last row the last one.

    Source: Liu et al., "HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language
    Models", equations of anchors, buffers and registers; the authors' code for blocks and rounding.

    Differs from the paper: neighbours off the grid are left out (see `edges`); anchors with their buffers never take
    more than the budget; every image has its own budget (the authors' code shares it among all tiles of a call), which
    its tiles share in proportion to their patches, newline tokens go first; tokens keep their positions of the full
    prompt. HiPrune++, which adds tokens by the question, is not here.
    """

    alpha: Annotated[float, Ge(0), Le(1)] = 0.1
    object_layer: int | Annotated[float, Gt(0), Lt(1)] = 0.39
    edges: Literal["grid", "sequence"] = "grid"

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        return self.object_layer, -1

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        objects, deep = (tokens.encoder_received_attention(layer).float().mean(dim=1) for layer in self.encoder_layers)
        wanted = (tiles.num_kept.double() * self.alpha / _WITH_NEIGHBOURS).round().long()  # of halves the even number
        wanted = tiles.zero_non_patches(torch.minimum(wanted, tiles.num_kept // _WITH_NEIGHBOURS))
        first = self._crosses(tokens, tiles, tiles.top(objects, wanted))
        registers = tiles.top(deep, tiles.num_kept - tiles.count_selected(first), ~first)
        return Selection(first | registers, counts=tokens.keep)

    def _crosses(self, tokens: VisualTokens, tiles: Tiles, anchors: torch.Tensor) -> torch.Tensor:
        """bool `[S, N]`: the anchors and their neighbours."""
        patches = tokens.patches
        at = partition(anchors)[:, : max(tokens.keep) // _WITH_NEIGHBOURS]  # of each anchor, then of other tokens
        row, column, height, width, tile = (
            one.gather(1, at) for one in (patches.row, patches.column, patches.height, patches.width, tiles.index)
        )
        real, place, found = anchors.gather(1, at), patches.row * patches.width + patches.column, anchors
        for down, across in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            there = (row + down) * width + column + across
            inside = real
            if self.edges == "grid":
                inside = real & _within(row + down, height) & _within(column + across, width)
            there = torch.minimum(there.clamp(min=0), height * width - 1)
            hit = (place[:, :, None] == there[:, None]) & (tiles.index[:, :, None] == tile[:, None]) & inside[:, None]
            found = found | hit.any(dim=2)
        return found


def _within(place: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    return (place >= 0) & (place < length)
