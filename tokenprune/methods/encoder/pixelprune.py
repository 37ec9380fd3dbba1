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

_STEPS = 8  # bisection steps of the search for a threshold, for a resolution of 1/256 (8-bit colors)


@register("pixelprune", site=Site.IN_ENCODER, paper="arXiv 2604.00886")
@dataclass(frozen=True)
class PixelPrune(UnitDropper):
    """Drop patches that repeat their neighbours before the vision tower (PixelPrune).

    A unit (the patches of one visual token, 2 x 2 in Qwen's models) is compared, pixel by pixel, with a prediction from
    the units to its left and above, and in a video with the same unit of the previous temporal patch. Units equal to
    their prediction are dropped before the vision tower, so neither tower nor decoder process them. Pages, screens and
    charts lose many units; photographs lose few.

    The content decides the number of kept tokens. `keep` is an upper bound per image or video; without it, only
    repetitions are dropped. If the bound is exceeded, the smallest sufficient threshold is used, and exactly `keep`
    tokens are kept. `keep=1.0` drops no tokens.

    Args:
        threshold: Maximum distance, in color values from 0 to 1, between a unit and its prediction for the unit to be
            dropped. 0 drops exact repetitions; 0.02 to 0.05 suit scans and JPEG. Values above 0 require `processor=`,
            which knows the normalisation of the colors.
        metric: Distance of two units: "max" or "mae", the largest or mean difference of their values, or "rmse".
        anchored: Predict from reconstructed units, so that each pixel is within the threshold of the pixel that
            replaces it. False compares with the original neighbours: it is faster, but drops slow gradients completely.
        neighbours: "all", or "before" for the same unit of the previous temporal patch only. "before" keeps the first
            frame of a video and all of an image; if `keep` is smaller than the first frame, its units are spread
            evenly. With metric="mae", threshold=0.1 and anchored=False it is DTD on pixels (arXiv 2504.17343).

    Source:
        "PixelPrune: Pixel-Level Adaptive Visual Token Reduction via Predictive Coding" (arXiv 2604.00886), the
        predictor pred_2d.

    Differences from the paper:
        - The upper bound is an addition: a search for the threshold, then the largest prediction errors are kept.
        - Videos are an addition, predicted from the previous frame as in run-length tokenization (arXiv 2411.05222).
        - Any tower with packed patches is supported, with colors as its processor normalises them.
        - The DTD setting compares each frame of a temporal patch with its counterpart. DTD's authors compare the later
          frame of a patch with the earlier frame of the patch before.

    Examples:
        >>> model, processor = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, PixelPrune(threshold=0.02), processor=processor)
    """

    default_keep: ClassVar[int] = 1_000_000  # tokens per image: no bound

    threshold: Annotated[float, Ge(0), Le(1)] = 0.0
    metric: Literal["max", "mae", "rmse"] = "max"
    anchored: bool = True
    neighbours: Literal["all", "before"] = "all"

    @property
    def reads_colours(self) -> str | None:
        return f"threshold={self.threshold} is a distance of color values from 0 to 1" if self.threshold else None

    def is_identity(self, budget: Budget) -> bool:
        """Return True if no tokens are dropped.

        Raises:
            OptionError: If the budget contradicts `threshold`.
        """
        is_identity = budget.is_identity()
        self._check(
            not (is_identity and self.threshold),
            f"keep=1.0 drops no tokens, but threshold={self.threshold} does. Pass only one.",
        )
        return is_identity

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        if self.neighbours == "before" and max_units < pixels.shape[1] * pixels.shape[2]:
            keep = torch.zeros(pixels.shape[:3], dtype=torch.bool, device="cpu")
            keep.view(-1)[spread_over_grid(keep[0].numel(), max_units, (1, *keep.shape[1:]))] = True
            return to_device(keep, pixels.device)
        distances = Distances.from_pixels(pixels, self.metric, spatial=self.neighbours == "all")
        low = self.threshold
        best = self._predict(pixels, distances, low)
        if max_units >= best.keep.numel() or int(best.keep.sum()) <= max_units:
            return best.keep
        # At the range of the colors, every unit but the first equals its prediction.
        high = float(pixels.amax() - pixels.amin())
        for _ in range(_STEPS):
            middle = (low + high) / 2
            prediction = self._predict(pixels, distances, middle)
            count = int(prediction.keep.sum())
            if count == max_units:
                return prediction.keep
            if count > max_units:
                low, best = middle, prediction
            else:
                high = middle
        error, keep = best.error.flatten()[None], best.keep.flatten()[None]
        return top_mask(error, keep, to_device([max_units], error.device), max_units).view_as(best.keep)

    def _predict(self, pixels: Tensor, distances: Distances, threshold: float) -> Prediction:
        if threshold == 0 or not self.anchored:
            return predict_from_neighbours(distances, threshold)
        predict = predict_anchored if self.neighbours == "all" else predict_anchored_in_time
        return predict(pixels, threshold, self.metric)
