# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.drawn import uniform
from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.units import Sees, UnitDropper

if TYPE_CHECKING:
    from torch import Tensor

_SEES: dict[str, Sees] = {"diverse": "mean", "change": "change", "detail": "pixels"}


@register("towerdrop", site=Site.IN_ENCODER, paper="none (scores of arXiv 2503.02175 and 2512.18747)")
@dataclass(frozen=True)
class TowerDrop(UnitDropper):
    """Drop units of patches at the input of an early block of the vision tower, so that the tower itself gets cheaper.

    A unit is what becomes one visual token. Exactly `keep` of each image stay, of a video in each frame alike, for the
    blocks from `layer` on and for the decoder.

    layer: index of the block at whose input units leave; 0: before any block ran.
    score: the units that stay. "diverse": those that differ most from each other, by the cosine distance of their mean
    states, farthest first. "change": those that the block before changed most; from `layer` 1 on. "norm": those with
    the largest states; its direction is a property of the weights, so that a model may want the opposite. "detail":
    those with the largest steps between neighbouring pixels, known before the first block; takes `processor=`.
    "random": drawn, the baseline.
    seed: int. Of "random"; the draw depends on it and on the size of the image.

    Source: none, it is ours. "diverse" is the rule of DivPrune (arXiv 2503.02175), which its authors apply after the
    tower; "change" is the score of IPCV (arXiv 2512.18747), which brings the dropped patches back after the tower. That
    accuracy holds at an early block is measured on small models alone.
    """

    chooses_count: ClassVar[bool] = False

    layer: Annotated[int, Ge(0)] = 2
    score: Literal["diverse", "change", "norm", "detail", "random"] = "diverse"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            self.layer > 0 or self.score != "change",
            'score="change" compares with the block before layer=0, of which there is none: give layer=1 or more',
        )

    @property
    def sees(self) -> Sees:
        return _SEES.get(self.score, "hidden")

    @property
    def reads_colours(self) -> str | None:
        return 'score="detail" compares colours from 0 to 1' if self.score == "detail" else None

    def block(self, depth: int) -> int:
        return self.layer

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        frames, height, width, _ = pixels.shape
        units = pixels.flatten(1, 2)
        mask = torch.ones(units.shape[:2], dtype=torch.bool, device=units.device)
        # Frames that cannot keep as many as the others are spread evenly.
        ends = [most * frame // frames for frame in range(frames + 1)]
        counts = [end - start for start, end in pairwise(ends)]
        budget, largest = to_device(counts, units.device), max(counts)
        if self.score == "diverse":
            return farthest(units, mask, budget, largest).view(frames, height, width)
        return top_mask(self._scores(units), mask, budget, largest).view(frames, height, width)

    def _scores(self, units: Tensor) -> Tensor:
        """float32 `[T, N]` of units `[T, N, P]`, the highest of which stay."""
        if self.score == "random":
            drawn = uniform(*units.shape[:2], generator=torch.Generator("cpu").manual_seed(self.seed))
            return to_device(drawn, units.device)
        if self.score == "detail":
            # In whole colours, of which any sum is exact, however they were normalised before.
            return units.mul(255).round().diff(dim=2).abs().sum(2)
        return units.norm(dim=2)
