# SPDX-License-Identifier: Apache-2.0
"""Tiles of an image with their budgets, and attention scores of patches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import split_budget
from tokenprune.selection.observables.tiling import Tiling
from tokenprune.selection.tokens import VisualTokens


@dataclass(frozen=True)
class Tiles:
    """Tiles of each image, or frames of a video, with their share of the budget.

    S is the number of segments, N the number of tokens and T the number of tiles. Index T holds tokens that are not
    patches, such as newlines, and index T + 1 holds padding.

    Args:
        index: Tile of each token, long (S, N).
        num_kept: Number of kept tokens per tile, in proportion to `sizes`, long (S, T + 2). Other tokens are kept only
            if the budget exceeds the number of patches.
        sizes: Number of tokens per tile, long (S, T + 2).
    """

    index: torch.Tensor
    num_kept: torch.Tensor
    sizes: torch.Tensor

    @staticmethod
    def from_tokens(tokens: VisualTokens) -> Tiles:
        """Return the tiles of `tokens`. The method must need an observable of the vision tower."""
        patches = tokens.patches
        return patches.cache.get(("tiles", *tokens.keep), lambda: Tiles._build(tokens, patches.tile, patches.tiles))

    @staticmethod
    def _build(tokens: VisualTokens, tile: torch.Tensor, tiles: int) -> Tiles:
        index = torch.where(tile >= 0, tile, tiles).masked_fill(~tokens.mask, tiles + 1)
        sizes = torch.zeros(len(index), tiles + 2, dtype=torch.long, device=index.device)
        sizes = sizes.scatter_add(1, index, torch.ones_like(index))
        num_kept = split_budget(sizes[:, :tiles], tokens.budget, sizes[:, :tiles])
        num_others = tokens.budget - num_kept.sum(1)
        num_kept = torch.cat([num_kept, num_others[:, None], torch.zeros_like(num_others)[:, None]], dim=1)
        return Tiles(index, num_kept, sizes)

    @property
    def num_tiles(self) -> int:
        """Largest number of tiles of an image, T."""
        return self.num_kept.shape[1] - 2

    @cached_property
    def is_patch(self) -> torch.Tensor:
        """Tokens that are patches, bool (S, N)."""
        return self.index < self.num_tiles

    @cached_property
    def is_other(self) -> torch.Tensor:
        """Tokens that are not patches, bool (S, N)."""
        return self.index >= self.num_tiles

    @cached_property
    def token_index(self) -> torch.Tensor:
        """Index of each token, long (N,)."""
        return torch.arange(self.index.shape[1], device=self.index.device)

    def share_budget(self, tiling: Tiling, thumbnail: torch.Tensor, weight: torch.Tensor) -> Tiles:
        """Return the tiles with another distribution of the budget. Images without a thumbnail are unchanged.

        Args:
            tiling: Tiling of the images.
            thumbnail: Number of tokens that the thumbnail (the first tile) keeps, long (S,).
            weight: Relative share of each other tile, up to its size, float (S, T).
        """
        num_patches = self.num_kept[:, : self.num_tiles].sum(1)
        max_kept = self.sizes[:, : self.num_tiles].clone()
        num_first = torch.minimum(torch.minimum(thumbnail, num_patches), max_kept[:, 0])
        max_kept[:, 0] = 0
        num_kept = split_budget(weight, num_patches - num_first, max_kept)
        num_kept[:, 0] = num_patches - num_kept.sum(1)
        has_tiles = (tiling.width > 0)[:, None]
        num_kept = torch.where(has_tiles, num_kept, self.num_kept[:, : self.num_tiles])
        return replace(self, num_kept=torch.cat([num_kept, self.num_kept[:, self.num_tiles :]], dim=1))

    def sum_by(self, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` (S, N) by `index`, long (S, N), float64 (S, T + 2). Values that are not finite count as 0."""
        sums = torch.zeros(self.num_kept.shape, dtype=torch.double, device=index.device)
        return sums.scatter_add(1, index, values.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def expand(self, per_tile: torch.Tensor) -> torch.Tensor:
        """Return the value of each token's tile, (S, N). per_tile: (S, T + 2)."""
        return per_tile.gather(1, self.index)

    def zero_non_patches(self, per_tile: torch.Tensor) -> torch.Tensor:
        """Set the entries that are not tiles to 0. per_tile: (S, T + 2)."""
        return torch.cat([per_tile[:, : self.num_tiles], torch.zeros_like(per_tile[:, self.num_tiles :])], dim=1)

    def count_selected(self, selected: torch.Tensor) -> torch.Tensor:
        """Count the selected tokens of each tile, long (S, T + 2). selected: bool (S, N)."""
        return torch.zeros_like(self.num_kept).scatter_add(1, self.index, selected.long())

    def top(self, score: torch.Tensor, num_kept: torch.Tensor, candidates: torch.Tensor | None = None) -> torch.Tensor:
        """Select the best tokens of each tile, bool (S, N). Ties go to the lower index, and NaN is worst.

        Args:
            score: Scores, (S, N).
            num_kept: Number of tokens per tile, long (S, T + 2).
            candidates: Tokens that may be selected, bool (S, N), or None for all.
        """
        if candidates is None:
            return rank_in_group(self.index, make_sortable(score)) < self.expand(num_kept)
        rank = rank_in_group(self.index, candidates.to(torch.uint8), make_sortable(score))
        return (rank < self.expand(num_kept)) & candidates


def make_sortable(score: torch.Tensor) -> torch.Tensor:
    """Return `score` in float32, with NaN replaced by -inf."""
    return score.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)


def compute_patch_attention(tokens: VisualTokens, layer: int | float = -1) -> torch.Tensor:
    """Return the attention of each patch in a tower block, float32 (S, N): the mean over heads, 0 for other tokens.

    The method must need "encoder_attention".
    """
    return tokens.encoder_attention(layer).float().mean(dim=1)
