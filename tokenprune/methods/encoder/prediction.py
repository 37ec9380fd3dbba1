# SPDX-License-Identifier: Apache-2.0
"""Predict each unit of a grid of pixels from the units beside it, as lossless codecs of images do (LOCO-I).

X is the unit at hand, A the one on its left, B the one above, C the one above A. Two are similar if their distance is
at most the threshold. X is predicted from B if C is similar to A and not to B (an edge runs down between C and B), else
from A; in the first row from A, in the first column from B. In a video X is also predicted from the unit at its place
one temporal patch before. A unit that a prediction is similar to is gone; the first one stays. Predicted from the patch
before alone, the first frame stays whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("max", "mae", "rmse")
# Colours come from a normalisation and back, which rounds; 0 stays exact.
_ROUNDING = 1 + 1e-4


@dataclass(frozen=True)
class Prediction:
    """The outcome of predicting T x H x W units.

    keep:   bool `[T, H, W]`, those that no prediction is similar to.
    error:  float32 `[T, H, W]`, distance to the better prediction; inf for the first unit, which has none.
    source: long `[T, H, W]`, for each unit the place (in the flattened grid) of the one whose pixels stand for it; None
            where neighbours were taken as they are, so that nothing is reconstructed.
    """

    keep: Tensor
    error: Tensor
    source: Tensor | None = None


def compute_distance(a: Tensor, b: Tensor, metric: str) -> Tensor:
    """Return float `[...]`, how far the units a and b, `[..., P]`, are apart: the largest ("max"), mean ("mae") or root
    mean square ("rmse") difference of their values."""
    difference = a - b
    if metric == "rmse":
        return difference.square_().mean(-1).sqrt_()
    difference = difference.abs_()
    return difference.amax(-1) if metric == "max" else difference.mean(-1)


@dataclass(frozen=True)
class Distances:
    """The distance of each unit to its neighbours, float32 `[T, H, W]` each: to the one on its left, above, and one
    temporal patch before (None of a single frame); inf where there is none."""

    left: Tensor
    above: Tensor
    before: Tensor | None

    @staticmethod
    def from_pixels(pixels: Tensor, metric: str, spatial: bool = True) -> Distances:
        """pixels: `[T, H, W, P]`. Frame by frame, so that no second copy of a video is made. spatial: units of the same
        frame are neighbours too."""
        left, above = (pixels.new_full(pixels.shape[:3], torch.inf) for _ in range(2))
        before = torch.full_like(left, torch.inf) if len(pixels) > 1 else None
        for t, frame in enumerate(pixels):
            if spatial:
                left[t, :, 1:] = compute_distance(frame[:, 1:], frame[:, :-1], metric)
                above[t, 1:] = compute_distance(frame[1:], frame[:-1], metric)
            if before is not None and t:
                before[t] = compute_distance(frame, pixels[t - 1], metric)
        return Distances(left, above, before)


def predict_from_neighbours(found: Distances, threshold: float) -> Prediction:
    """Predict every unit from its neighbours as they are: no loop over units. At threshold 0 this is the same as
    `anchored`, since what is equal to a neighbour reconstructs to it."""
    limit = threshold * _ROUNDING
    left, above = found.left <= limit, found.above <= limit
    # Of X: C is similar to A if the unit on the left is similar to the one above it; C to B likewise.
    take_above = above[:, 1:, :-1] > left[:, :-1, 1:]
    spatial = found.left.clone()
    spatial[:, 1:, 0] = found.above[:, 1:, 0]
    spatial[:, 1:, 1:] = torch.where(take_above, found.above[:, 1:, 1:], found.left[:, 1:, 1:])
    error = spatial if found.before is None else torch.minimum(spatial, found.before)
    return Prediction(~(error <= limit), error)


def predict_anchored(pixels: Tensor, threshold: float, metric: str) -> Prediction:
    """Predict every unit from what a decoder would have: a kept unit is itself, one that is gone has the pixels of its
    prediction. So no unit is further than the threshold from what stands for it, however long the chain.

    pixels: `[T, H, W, P]`. A diagonal at a time: what a unit is predicted from lies on the diagonals before it.
    """
    frames, height, width, _ = pixels.shape
    x, limit = pixels.flatten(0, 2), threshold * _ROUNDING
    source = torch.arange(len(x), device=x.device)
    error = x.new_full((len(x),), torch.inf)
    for at in (one.to(x.device) for one in _diagonals(frames, height, width)):
        row, column = at // width % height, at % width
        a, b, c, p = (source[(at - step).clamp(min=0)] for step in (1, width, width + 1, height * width))
        edge = (compute_distance(x[c], x[a], metric) <= limit) & (compute_distance(x[c], x[b], metric) > limit)
        prediction = torch.where((row > 0) & (edge | (column == 0)), b, a)
        own = x[at]
        spatial = compute_distance(own, x[prediction], metric).masked_fill((row == 0) & (column == 0), torch.inf)
        temporal = compute_distance(own, x[p], metric).masked_fill(at < height * width, torch.inf)
        source[at] = torch.where(temporal <= limit, p, torch.where(spatial <= limit, prediction, at))
        error[at] = torch.minimum(spatial, temporal)
    shape = frames, height, width
    keep = source == torch.arange(len(x), device=x.device)
    return Prediction(keep.view(shape), error.view(shape), source.view(shape))


def predict_anchored_in_time(pixels: Tensor, threshold: float, metric: str) -> Prediction:
    """Predict every unit as `anchored` does, from its place one temporal patch before alone."""
    x, limit = pixels.flatten(1, 2), threshold * _ROUNDING
    stands, (count, units) = x[0], x.shape[:2]
    source = torch.arange(count * units, device=x.device).view(count, units)
    error = x.new_full(source.shape, torch.inf)
    for t in range(1, count):
        error[t] = compute_distance(x[t], stands, metric)
        same = error[t] <= limit
        source[t] = torch.where(same, source[t - 1], source[t])
        stands = torch.where(same[:, None], stands, x[t])
    keep = source.flatten() == torch.arange(count * units, device=x.device)
    shape = pixels.shape[:3]
    return Prediction(keep.view(shape), error.view(shape), source.view(shape))


@lru_cache(maxsize=16)
def _diagonals(frames: int, height: int, width: int) -> tuple[Tensor, ...]:
    """Places of the flattened grid by t + row + column, ascending; long, on the host."""
    axes = [torch.arange(size, device="cpu") for size in (frames, height, width)]
    t, row, column = torch.meshgrid(*axes, indexing="ij")
    number = (t + row + column).flatten()
    order = number.argsort(stable=True)
    return order.split(number.bincount().tolist())
