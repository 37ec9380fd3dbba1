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
    """Keep a quarter by tower attention, spread the rest evenly, and merge the remaining patches.

    In each tile or frame, a quarter of the kept patches have the most attention, as in `PruMerge`. The other kept
    patches are spread evenly over the remaining patches in raster order. One more token becomes the attention-weighted
    mean of all patches that are not kept.

    Args:
        merge: "rest" merges the remaining patches into one token. "clusters" merges each remaining patch into the most
            similar kept patch that has it among its nearest `neighbours`, weighted by attention. "none" drops the
            remaining patches.
        neighbours: Number of nearest patches of the same tile that a kept patch may absorb, by the keys of the block.
            Used by "clusters".
        exact: Keep exactly the budget. False uses the authors' number: all patches above the upper fence of a box plot,
            about three evenly spaced patches for each of these, and the token for the rest. The image then determines
            the number of tokens, and `keep` has no effect unless it keeps all tokens.

    Source:
        Shang et al., "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models" (arXiv
        2403.15388), PruMerge+, and the authors' code for the spacing.

    Differences from the paper:
        - All differences of `PruMerge`.
        - The share of a quarter is an addition. It is about the share that the authors' spacing produces.
        - With `exact=False`, an image without outliers keeps only the merged token (the authors' code divides by zero),
          and an image with outliers in more than a third of its patches keeps every patch except the last (their code
          fails).

    Examples:
        >>> model = tokenprune.patch(model, PruMergePlus(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    def _pick(self, tiles: Tiles, attention: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
        num_dominant = torch.where(num_kept > 0, ((num_kept + 2) // 4).clamp(min=1), 0)  # a quarter, rounded
        num_dominant = torch.cat([num_dominant[:, : tiles.num_tiles], num_kept[:, tiles.num_tiles :]], dim=1)
        dominant = tiles.top(attention, num_dominant)
        rest = tiles.is_patch & ~dominant
        order = rank_in_group(torch.where(rest, tiles.index, tiles.num_tiles + 1))
        num_spread = tiles.expand(num_kept - num_dominant)
        num_left = tiles.expand(tiles.count_selected(rest)).clamp(min=1)
        return dominant | (rest & ((-order * num_spread) % num_left < num_spread))

    def _pick_adaptive(self, tiles: Tiles, attention: torch.Tensor, num_outliers: torch.Tensor) -> torch.Tensor:
        step = (tiles.sizes // (3 * num_outliers).clamp(min=1)).clamp(min=1)
        order, last = rank_in_group(tiles.index), tiles.expand(tiles.sizes) - 1
        is_spread = (
            tiles.is_patch & (tiles.expand(num_outliers) > 0) & (order % tiles.expand(step) == 0) & (order < last)
        )
        return tiles.top(attention, num_outliers) | is_spread
