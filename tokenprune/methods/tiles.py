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

    of:     long `[S, N]`, the tile of each token; T for what is no patch (newlines, a class token), T + 1 for padding.
    number: long `[S, T + 2]`, how many of each stay, in proportion to `sizes`; what is no patch stays where more is to
            be kept than there are patches.
    sizes:  long `[S, T + 2]`, how many tokens each has.
    """

    of: torch.Tensor
    number: torch.Tensor
    sizes: torch.Tensor

    @staticmethod
    def among(tokens: VisualTokens) -> Tiles:
        """Return the tiles of `tokens`; the method needs an observable of the vision tower."""
        patches = tokens.patches
        return patches.cache.get(("tiles", *tokens.keep), lambda: Tiles._of(tokens, patches.tile, patches.tiles))

    @staticmethod
    def _of(tokens: VisualTokens, tile: torch.Tensor, tiles: int) -> Tiles:
        of = torch.where(tile >= 0, tile, tiles).masked_fill(~tokens.mask, tiles + 1)
        sizes = torch.zeros(len(of), tiles + 2, dtype=torch.long, device=of.device)
        sizes = sizes.scatter_add(1, of, torch.ones_like(of))
        number = shares(sizes[:, :tiles], tokens.budget, sizes[:, :tiles])
        others = tokens.budget - number.sum(1)
        return Tiles(of, torch.cat([number, others[:, None], torch.zeros_like(others)[:, None]], dim=1), sizes)

    @property
    def count(self) -> int:
        """T, at least the number of tiles of any image."""
        return self.number.shape[1] - 2

    @property
    def patch(self) -> torch.Tensor:
        """bool `[S, N]`: which tokens are patches."""
        return self.of < self.count

    def shared(self, tiling: Tiling, thumbnail: torch.Tensor, weight: torch.Tensor) -> Tiles:
        """Return the tiles with another number of tokens each: an image with a thumbnail keeps `thumbnail` (long `[S]`)
        of it, the first tile, and the others share the rest by `weight` (float `[S, T]`), as far as they have room."""
        patches = self.number[:, : self.count].sum(1)
        most = self.sizes[:, : self.count].clone()
        first = torch.minimum(torch.minimum(thumbnail, patches), most[:, 0])
        most[:, 0] = 0
        number = shares(weight, patches - first, most)
        number[:, 0] = patches - number.sum(1)
        cut = (tiling.width > 0)[:, None]
        return replace(
            self,
            number=torch.cat(
                [torch.where(cut, number, self.number[:, : self.count]), self.number[:, self.count :]], dim=1
            ),
        )

    def sums(self, of: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """float64 `[S, T + 2]`: the sum of `values` (float `[S, N]`, NaN as 0) over the tokens of each number in `of`,
        long `[S, N]`."""
        made = torch.zeros(self.number.shape, dtype=torch.double, device=of.device)
        return made.scatter_add(1, of, values.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def each(self, numbers: torch.Tensor) -> torch.Tensor:
        """long `[S, N]`: of `numbers`, `[S, T + 2]`, that of each token's tile."""
        return numbers.gather(1, self.of)

    def only(self, numbers: torch.Tensor) -> torch.Tensor:
        """`[S, T + 2]`: `numbers` of the tiles, 0 for what is no patch."""
        return torch.cat([numbers[:, : self.count], torch.zeros_like(numbers[:, self.count :])], dim=1)

    def total(self, chosen: torch.Tensor) -> torch.Tensor:
        """long `[S, T + 2]`: how many tokens of each tile are `chosen`, bool `[S, N]`."""
        return torch.zeros_like(self.number).scatter_add(1, self.of, chosen.long())

    def top(self, score: torch.Tensor, number: torch.Tensor, among: torch.Tensor | None = None) -> torch.Tensor:
        """bool `[S, N]`: the best of each tile, as many as `number`, long `[S, T + 2]`, says, out of `among`, bool
        `[S, N]` (None: all). Of equal ones the lower index is better, NaN is worst."""
        if among is None:
            return rank_in_group(self.of, ranked(score)) < self.each(number)
        return (rank_in_group(self.of, among.to(torch.uint8), ranked(score)) < self.each(number)) & among


def ranked(score: torch.Tensor) -> torch.Tensor:
    """float32: `score` with NaN as the lowest, so that it can be sorted."""
    return score.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)


def attended(tokens: VisualTokens, layer: int | float = -1) -> torch.Tensor:
    """float32 `[S, N]`: attention that each patch gets in a block of the vision tower ("encoder_attention"), the mean
    over heads; 0 for what is no patch."""
    return tokens.encoder_attention(layer).float().mean(dim=1)
