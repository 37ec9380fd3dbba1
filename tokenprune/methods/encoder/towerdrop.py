# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.host_random import uniform
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.units import UnitDropper, UnitInput

if TYPE_CHECKING:
    from torch import Tensor

_SEES: dict[str, UnitInput] = {"diverse": "mean", "change": "change", "detail": "pixels"}


@register("towerdrop", site=Site.IN_ENCODER, paper="none (scores of arXiv 2503.02175 and 2512.18747)")
@dataclass(frozen=True)
class TowerDrop(UnitDropper):
    """Drop patches at an early block of the vision tower.

    A unit is the group of patches that becomes one visual token. Exactly `keep` units of each image, or of each frame
    of a video, are kept for the blocks from `layer` on and for the decoder.

    Args:
        layer: Index of the first block that runs on the kept units. 0: the whole tower does.
        score: Rule that selects the kept units. "diverse": farthest point sampling by cosine distance of mean states.
            "change": largest change by the previous block, from layer 1 on. "norm": largest states; the useful
            direction depends on the model. "detail": largest differences between neighbouring pixels; requires
            `processor=`. "random": a random baseline.
        seed: Seed for score="random". The draw depends on the seed and the size of the image.

    Source:
        An addition of this library. "diverse" is the rule of DivPrune (arXiv 2503.02175), which its authors apply after
        the tower. "change" is the score of IPCV (arXiv 2512.18747), which restores the dropped patches after the tower.
        Accuracy at an early block was measured on small models only.

    Examples:
        >>> model = tokenprune.patch(model, TowerDrop(layer=1), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).encoder_tokens_per_layer
        [257, 129, 129, 129]
    """

    chooses_count: ClassVar[bool] = False

    layer: Annotated[int, Ge(0)] = 2
    score: Literal["diverse", "change", "norm", "detail", "random"] = "diverse"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            self.layer > 0 or self.score != "change",
            'score="change" needs a previous block. Pass layer=1 or more.',
        )

    @property
    def sees(self) -> UnitInput:
        return _SEES.get(self.score, "hidden")

    @property
    def reads_colours(self) -> str | None:
        return 'score="detail" compares color values from 0 to 1' if self.score == "detail" else None

    def block(self, depth: int) -> int:
        return self.layer

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        frames, height, width, _ = pixels.shape
        units = pixels.flatten(1, 2)
        mask = torch.ones(units.shape[:2], dtype=torch.bool, device=units.device)
        # The remainder of the division is spread evenly over the frames.
        ends = [max_units * frame // frames for frame in range(frames + 1)]
        counts = [end - start for start, end in pairwise(ends)]
        budget, max_per_frame = to_device(counts, units.device), max(counts)
        if self.score == "diverse":
            return farthest(units, mask, budget, max_per_frame).view(frames, height, width)
        return top_mask(self._compute_scores(units), mask, budget, max_per_frame).view(frames, height, width)

    def _compute_scores(self, units: Tensor) -> Tensor:
        """Return the score of each unit, shape (frames, units), float32. Higher scores are kept."""
        if self.score == "random":
            values = uniform(*units.shape[:2], generator=torch.Generator("cpu").manual_seed(self.seed))
            return to_device(values, units.device)
        if self.score == "detail":
            # Rounding to 8-bit colors makes the sums exact, independent of the normalisation.
            return units.mul(255).round().diff(dim=2).abs().sum(2)
        return units.norm(dim=2)
