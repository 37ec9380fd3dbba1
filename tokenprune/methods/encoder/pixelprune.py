# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.encoder.prediction import (
    Distances,
    Prediction,
    predict_anchored,
    predict_anchored_in_time,
    predict_from_neighbours,
)
from tokenprune.methods.pre_llm.uniform import spread_over_grid
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.sites.units import UnitDropper

if TYPE_CHECKING:
    from torch import Tensor

_STEPS = 8  # of the search for a threshold: 1/256 of the range of colours, as many as images have


@register("pixelprune", site=Site.IN_ENCODER, paper="arXiv 2604.00886")
@dataclass(frozen=True)
class PixelPrune(UnitDropper):
    """Drop the patches that repeat their neighbours, ahead of the vision tower: pages, screens and charts keep their
    text.

    What becomes one visual token (2 x 2 patches in Qwen's models) is compared, pixel by pixel, with a prediction from
    the units on its left and above it, and in a video with the unit at its place one temporal patch before. What is
    equal to it is dropped: the tower does not see it, nor does the decoder. So the content decides how many stay, of a
    photograph nearly all.

    `keep` is an upper bound for each image or video; without it there is none, and nothing but repetitions goes. Where
    more would stay, the smallest threshold is looked for at which no more do, and exactly `keep` stay. `keep=1.0` drops
    nothing, as with every method.

    threshold: how far, in colours from 0 to 1, a unit may be from its prediction to be dropped; 0 drops exact
    repetitions alone, 0.02 to 0.05 suit scans and JPEG. Above 0 it takes `processor=`, which knows the colours.
    metric: "max", the largest difference of a pixel's colour; "mae", the mean; or "rmse", the root of the mean square.
    anchored: predict from what is left of the neighbours, so that no pixel is further than the threshold from what
    stands for it; False compares with the neighbours themselves, which is faster, and drops slow gradients whole.
    neighbours: "all"; or "before", the unit at its place one temporal patch before alone, so that of a video the first
    frame stays whole, and of an image everything: DTD on pixels (arXiv 2504.17343) with metric="mae", threshold=0.1,
    anchored=False. Where `keep` is less than the first frame, its units are spread evenly.

    Source: "PixelPrune: Pixel-Level Adaptive Visual Token Reduction via Predictive Coding", the predictor pred_2d.

    Differs from the paper: a bound on the number, by a search for the threshold, and then by the smallest errors of
    prediction (our decision); videos, with the prediction from the frame before (the idea of run-length tokens, arXiv
    2411.05222; our decision); any tower with packed patches, and colours as its processor normalises them. DTD's
    authors compare the later frame of a temporal patch with the earlier one of the patch before; here each frame is
    compared with its like.
    """

    default_keep: ClassVar[int] = 1_000_000  # tokens an image: no bound

    threshold: Annotated[float, Ge(0), Le(1)] = 0.0
    metric: Literal["max", "mae", "rmse"] = "max"
    anchored: bool = True
    neighbours: Literal["all", "before"] = "all"

    @property
    def reads_colours(self) -> str | None:
        return f"threshold={self.threshold} is a distance of colours from 0 to 1" if self.threshold else None

    def is_identity(self, budget: Budget) -> bool:
        """Return True if nothing is dropped; raise OptionError for a budget that contradicts `threshold`."""
        whole = budget.is_identity()
        self._check(
            not (whole and self.threshold),
            f"keep=1.0 drops nothing, threshold={self.threshold} does: leave out one",
        )
        return whole

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        if self.neighbours == "before" and most < pixels.shape[1] * pixels.shape[2]:
            keep = torch.zeros(pixels.shape[:3], dtype=torch.bool, device="cpu")
            keep.view(-1)[spread_over_grid(keep[0].numel(), most, (1, *keep.shape[1:]))] = True
            return to_device(keep, pixels.device)
        found = Distances.from_pixels(pixels, self.metric, spatial=self.neighbours == "all")
        low = self.threshold
        best = self._predict(pixels, found, low)
        if most >= best.keep.numel() or int(best.keep.sum()) <= most:
            return best.keep
        # No two colours are further apart than the high end, where the first unit alone stays.
        high = float(pixels.amax() - pixels.amin())
        for _ in range(_STEPS):
            middle = (low + high) / 2
            tried = self._predict(pixels, found, middle)
            count = int(tried.keep.sum())
            if count == most:
                return tried.keep
            if count > most:
                low, best = middle, tried
            else:
                high = middle
        error, keep = best.error.flatten()[None], best.keep.flatten()[None]
        return top_mask(error, keep, to_device([most], error.device), most).view_as(best.keep)

    def _predict(self, pixels: Tensor, found: Distances, threshold: float) -> Prediction:
        if threshold == 0 or not self.anchored:
            return predict_from_neighbours(found, threshold)
        return (predict_anchored if self.neighbours == "all" else predict_anchored_in_time)(
            pixels, threshold, self.metric
        )
