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

_CROSS_SIZE = 5  # an anchor and its four neighbors


@register(
    "hiprune",
    site=Site.PRE_LLM,
    needs=("encoder_received_attention",),
    paper="arXiv 2508.00553, ACL 2026 Findings",
)
@dataclass(frozen=True)
class HiPrune(Pruner):
    """Keep anchors of a middle tower block with their neighbors, then patches of the last block.

    In each tile or frame, anchors are the patches that receive the most attention from all tokens in the object block.
    Buffers are the patches above, below, left and right of an anchor. Registers fill the remaining budget with the
    patches that receive the most attention in the last block that the model reads.

    Args:
        alpha: Share in [0, 1] of the kept tokens that are anchors and buffers.
        object_layer: Object block, as an int (see `Pruner.encoder_layers`) or a share of the depth between 0 and 1. The
            default is block 8 of CLIP-L's 24 and block 15 of Qwen2.5-VL's 32, counted from 0, as in the authors' code.
        edges: "grid" respects the ends of rows and columns. "sequence" takes neighbors in raster order as the authors'
            code does: the last patch of a row neighbors the first patch of the next row, and neighbors above the first
            or below the last row become the first or last patch.

    Source:
        Liu et al., "HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language Models"
        (arXiv 2508.00553), equations of anchors, buffers and registers, and the authors' code for blocks and rounding.

    Differences from the paper:
        - Neighbors outside of the grid are ignored, unless `edges="sequence"`.
        - Anchors and buffers never exceed the budget.
        - Each image has its own budget, which tiles share in proportion to their patches. The authors' code shares one
          budget among all tiles of a call.
        - Newline tokens are dropped first.
        - Kept tokens keep their positions in the prompt.
        - HiPrune++, which adds tokens by the question, is not implemented.

    Examples:
        >>> model = tokenprune.patch(model, HiPrune(alpha=0.2), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    alpha: Annotated[float, Ge(0), Le(1)] = 0.1
    object_layer: int | Annotated[float, Gt(0), Lt(1)] = 0.39
    edges: Literal["grid", "sequence"] = "grid"

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        return self.object_layer, -1

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        object_attention, last_attention = (
            tokens.encoder_received_attention(layer).float().mean(dim=1) for layer in self.encoder_layers
        )
        num_anchors = (tiles.num_kept.double() * self.alpha / _CROSS_SIZE).round().long()  # half to even
        num_anchors = tiles.zero_non_patches(torch.minimum(num_anchors, tiles.num_kept // _CROSS_SIZE))
        crosses = self._add_neighbors(tokens, tiles, tiles.top(object_attention, num_anchors))
        registers = tiles.top(last_attention, tiles.num_kept - tiles.count_selected(crosses), ~crosses)
        return Selection(crosses | registers, counts=tokens.keep)

    def _add_neighbors(self, tokens: VisualTokens, tiles: Tiles, anchors: torch.Tensor) -> torch.Tensor:
        """Return the anchors and their neighbors, bool (S, N)."""
        patches = tokens.patches
        indices = partition(anchors)[:, : max(tokens.keep) // _CROSS_SIZE]  # anchors come first
        row, column, height, width, tile = (
            field.gather(1, indices)
            for field in (patches.row, patches.column, patches.height, patches.width, tiles.index)
        )
        is_anchor, crosses = anchors.gather(1, indices), anchors
        flat_index = patches.row * patches.width + patches.column
        for down, across in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            neighbor = (row + down) * width + column + across
            inside = is_anchor
            if self.edges == "grid":
                inside = is_anchor & _is_within(row + down, height) & _is_within(column + across, width)
            neighbor = torch.minimum(neighbor.clamp(min=0), height * width - 1)
            same_tile = tiles.index[:, :, None] == tile[:, None]
            is_neighbor = (flat_index[:, :, None] == neighbor[:, None]) & same_tile & inside[:, None]
            crosses = crosses | is_neighbor.any(dim=2)
        return crosses


def _is_within(index: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    return (index >= 0) & (index < length)
