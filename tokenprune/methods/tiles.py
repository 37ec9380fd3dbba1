# SPDX-License-Identifier: Apache-2.0
"""Parts of the methods that choose by the vision tower's attention: scores of patches, and a budget for each tile."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import shares
from tokenprune.selection.observables.tiling import Tiling
from tokenprune.selection.tokens import VisualTokens


@dataclass(frozen=True)
class Tiles:
    """The T tiles of each image, or the frames of a video, with their parts of its budget.

    index:    long `[S, N]`, tile of each token; T for tokens that are not patches (newlines), T + 1 for padding.
    num_kept: long `[S, T + 2]`, number of kept tokens, in proportion to `sizes`.
    sizes:    long `[S, T + 2]`, how many tokens each has.
    """

    index: torch.Tensor
    num_kept: torch.Tensor
    sizes: torch.Tensor

    @staticmethod
    def from_tokens(tokens: VisualTokens) -> Tiles:
        """Return the tiles of `tokens`; the method needs an observable of the vision tower."""
        patches = tokens.patches
        return patches.recent.get(("tiles", *tokens.keep), lambda: Tiles._build(tokens, patches.tile, patches.tiles))

    @staticmethod
    def _build(tokens: VisualTokens, tile: torch.Tensor, tiles: int) -> Tiles:
        of = torch.where(tile >= 0, tile, tiles).masked_fill(~tokens.mask, tiles + 1)
        sizes = torch.zeros(len(of), tiles + 2, dtype=torch.long, device=of.device)
        sizes = sizes.scatter_add(1, of, torch.ones_like(of))
        number = shares(sizes[:, :tiles], tokens.budget, sizes[:, :tiles])
        others = tokens.budget - number.sum(1)
        return Tiles(of, torch.cat([number, others[:, None], torch.zeros_like(others)[:, None]], dim=1), sizes)

    @property
    def num_tiles(self) -> int:
        """T, at least the number of tiles of any image."""
        return self.num_kept.shape[1] - 2

    @property
    def is_patch(self) -> torch.Tensor:
        """bool `[S, N]`: which tokens are patches."""
        return self.index < self.num_tiles

    def share_budget(self, tiling: Tiling, thumbnail: torch.Tensor, weight: torch.Tensor) -> Tiles:
        """Return the tiles with another number of tokens each: an image with a thumbnail keeps `thumbnail` (long `[S]`)
        of it, the first tile, and the others share the rest by `weight` (float `[S, T]`), as far as they have room."""
        patches = self.num_kept[:, : self.num_tiles].sum(1)
        most = self.sizes[:, : self.num_tiles].clone()
        first = torch.minimum(torch.minimum(thumbnail, patches), most[:, 0])
        most[:, 0] = 0
        number = shares(weight, patches - first, most)
        number[:, 0] = patches - number.sum(1)
        cut = (tiling.width > 0)[:, None]
        return replace(
            self,
            num_kept=torch.cat(
                [torch.where(cut, number, self.num_kept[:, : self.num_tiles]), self.num_kept[:, self.num_tiles :]],
                dim=1,
            ),
        )

    def sum_by(self, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """float64 `[S, T + 2]`: the sum of `values` (float `[S, N]`, NaN as 0) over the tokens of each number in `of`,
        long `[S, N]`."""
        made = torch.zeros(self.num_kept.shape, dtype=torch.double, device=index.device)
        return made.scatter_add(1, index, values.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def expand(self, numbers: torch.Tensor) -> torch.Tensor:
        """long `[S, N]`: of `numbers`, `[S, T + 2]`, that of each token's tile."""
        return numbers.gather(1, self.index)

    def zero_non_patches(self, numbers: torch.Tensor) -> torch.Tensor:
        """`[S, T + 2]`: `numbers` of the tiles, 0 for what is no patch."""
        return torch.cat([numbers[:, : self.num_tiles], torch.zeros_like(numbers[:, self.num_tiles :])], dim=1)

    def count_selected(self, chosen: torch.Tensor) -> torch.Tensor:
        """long `[S, T + 2]`: how many tokens of each tile are `chosen`, bool `[S, N]`."""
        return torch.zeros_like(self.num_kept).scatter_add(1, self.index, chosen.long())

    def top(self, score: torch.Tensor, num_kept: torch.Tensor, candidates: torch.Tensor | None = None) -> torch.Tensor:
        """bool `[S, N]`: the best of each tile, as many as `number`, long `[S, T + 2]`, says, out of `among`, bool
        `[S, N]` (None: all). Of equal ones the lower index is better, NaN is worst."""
        if candidates is None:
            return rank_in_group(self.index, make_sortable(score)) < self.expand(num_kept)
        return (
            rank_in_group(self.index, candidates.to(torch.uint8), make_sortable(score)) < self.expand(num_kept)
        ) & candidates


def make_sortable(score: torch.Tensor) -> torch.Tensor:
    """float32: `score` with NaN as the lowest, so that it can be sorted."""
    return score.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)


def compute_patch_attention(tokens: VisualTokens, layer: int | float = -1) -> torch.Tensor:
    """float32 `[S, N]`: attention that each patch gets in a block of the vision tower ("encoder_attention"), the mean
    over heads; 0 for what is no patch."""
    return tokens.encoder_attention(layer).float().mean(dim=1)
