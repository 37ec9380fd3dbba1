# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.pre_llm.prumerge import PruMerge
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles
from tokenprune.selection.method import Site


@register("prumerge_plus", site=Site.PRE_LLM, paper="arXiv 2403.15388, ICCV 2025", merges=True)
@dataclass(frozen=True)
class PruMergePlus(PruMerge):
    """Keep a quarter by the vision tower's attention, the rest evenly spread, and one token for all others (PruMerge+).

    Of each tile (or frame), a quarter of those that stay are the ones that the class token attends to most, as in
    `prumerge`; the others are evenly spread over what is left, in raster order. One more stands for the rest.

    merge: "rest" is that; "clusters" has every other patch join, weighted by attention, that kept one among whose
    nearest it is, the most similar one if several are, by the keys of the same block; "none" drops the others.
    neighbours: int >= 1, how many patches of its tile are nearest to a kept one, for "clusters".
    exact: False is the authors' number: all that have more attention than the upper fence of a box plot, every so
    many-th patch, three for each of these, and the token for the rest: the image decides, whatever `keep` says, unless
    that is all of them.

    Source: Shang et al., "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models", PruMerge+;
    the authors' code for the steps.

    Differs from the paper: as `prumerge` does; that a quarter is by attention is ours, about what the authors' steps
    lead to; an image without any such attention keeps the token for the rest alone (the authors' code divides by zero),
    and one where more than a third have it every patch but the last (there the code fails too).
    """

    def _picked(self, tiles: Tiles, attention: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        dominant = torch.where(number > 0, ((number + 2) // 4).clamp(min=1), 0)  # a quarter, rounded
        dominant = torch.cat([dominant[:, : tiles.num_tiles], number[:, tiles.num_tiles :]], dim=1)
        best = tiles.top(attention, dominant)
        rest = tiles.is_patch & ~best
        place = rank_in_group(torch.where(rest, tiles.index, tiles.num_tiles + 1))
        wanted, left = tiles.expand(number - dominant), tiles.expand(tiles.count_selected(rest)).clamp(min=1)
        return best | (rest & ((-place * wanted) % left < wanted))

    def _adaptive(self, tiles: Tiles, attention: torch.Tensor, outliers: torch.Tensor) -> torch.Tensor:
        step = (tiles.sizes // (3 * outliers).clamp(min=1)).clamp(min=1)
        place, last = rank_in_group(tiles.index), tiles.expand(tiles.sizes) - 1
        spread = tiles.is_patch & (tiles.expand(outliers) > 0) & (place % tiles.expand(step) == 0) & (place < last)
        return tiles.top(attention, outliers) | spread
