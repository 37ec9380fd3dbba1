# SPDX-License-Identifier: Apache-2.0
"""Predict units of pixels from neighbouring units, as the lossless image codec LOCO-I does.

X is the predicted unit, A the unit to its left, B the unit above, and C the unit above A. Two units are similar if
their distance is at most the threshold. X is predicted from B if C is similar to A and not to B (an edge runs down
between C and B), otherwise from A. The first row uses A, the first column B. In a video, X is also predicted from the
same unit of the previous temporal patch. A unit similar to a prediction is dropped. The first unit is kept.

Shapes: T temporal patches, H rows and W columns of units, P pixel values per unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

METRICS = ("max", "mae", "rmse")
# Tolerance for the rounding of normalised colors. A threshold of 0 stays exact.
_ROUNDING = 1 + 1e-4


@dataclass(frozen=True)
class Prediction:
    """Result of a prediction.

    Attributes:
        keep: Units without a similar prediction, shape (T, H, W), bool.
        error: Distance to the better prediction, shape (T, H, W), float32; inf for the first unit.
        source: Flat index of the unit that replaces each unit, shape (T, H, W), int64. None if units are not
            reconstructed.
    """

    keep: Tensor
    error: Tensor
    source: Tensor | None = None


def compute_distance(a: Tensor, b: Tensor, metric: str) -> Tensor:
    """Return the distance of units a and b, shape (..., P): "max", mean ("mae") or "rmse" of the differences."""
    difference = a - b
    if metric == "rmse":
        return difference.square_().mean(-1).sqrt_()
    difference = difference.abs_()
    return difference.amax(-1) if metric == "max" else difference.mean(-1)


@dataclass(frozen=True)
class Distances:
    """Distance of each unit to its neighbours, each (T, H, W), float32; inf without a neighbour.

    Attributes:
        left: Distance to the unit to the left.
        above: Distance to the unit above.
        before: Distance to the same unit of the previous temporal patch. None for a single frame.
    """

    left: Tensor
    above: Tensor
    before: Tensor | None

    @staticmethod
    def from_pixels(pixels: Tensor, metric: str, spatial: bool = True) -> Distances:
        """Compute the distances frame by frame, without a second copy of a video.

        Args:
            pixels: Pixel values, shape (T, H, W, P).
            metric: See `compute_distance`.
            spatial: Compare units of the same frame too.
        """
        left, above = (pixels.new_full(pixels.shape[:3], torch.inf) for _ in range(2))
        before = torch.full_like(left, torch.inf) if len(pixels) > 1 else None
        for t, frame in enumerate(pixels):
            if spatial:
                left[t, :, 1:] = compute_distance(frame[:, 1:], frame[:, :-1], metric)
                above[t, 1:] = compute_distance(frame[1:], frame[:-1], metric)
            if before is not None and t:
                before[t] = compute_distance(frame, pixels[t - 1], metric)
        return Distances(left, above, before)


def predict_from_neighbours(distances: Distances, threshold: float) -> Prediction:
    """Predict every unit from its original neighbours, without a loop over units.

    At threshold 0 the result equals `predict_anchored`, because equal units reconstruct to their neighbours.
    """
    limit = threshold * _ROUNDING
    left, above = distances.left <= limit, distances.above <= limit
    # C is similar to A if A is similar to the unit above it, and to B if B is similar to the unit on its left.
    take_above = above[:, 1:, :-1] > left[:, :-1, 1:]
    spatial = distances.left.clone()
    spatial[:, 1:, 0] = distances.above[:, 1:, 0]
    spatial[:, 1:, 1:] = torch.where(take_above, distances.above[:, 1:, 1:], distances.left[:, 1:, 1:])
    error = spatial if distances.before is None else torch.minimum(spatial, distances.before)
    return Prediction(~(error <= limit), error)


def predict_anchored(pixels: Tensor, threshold: float, metric: str) -> Prediction:
    """Predict every unit from reconstructed units: a dropped unit has the pixels of its prediction.

    Every unit is within the threshold of the unit that replaces it. Units are processed by diagonals, because a unit
    depends only on earlier diagonals.

    Args:
        pixels: Pixel values, shape (T, H, W, P).
        threshold: Maximum distance of similar units.
        metric: See `compute_distance`.
    """
    frames, height, width, _ = pixels.shape
    x, limit = pixels.flatten(0, 2), threshold * _ROUNDING
    source = torch.arange(len(x), device=x.device)
    error = x.new_full((len(x),), torch.inf)
    for index in (diagonal.to(x.device) for diagonal in _list_diagonals(frames, height, width)):
        row, column = index // width % height, index % width
        a, b, c, p = (source[(index - step).clamp(min=0)] for step in (1, width, width + 1, height * width))
        edge = (compute_distance(x[c], x[a], metric) <= limit) & (compute_distance(x[c], x[b], metric) > limit)
        prediction = torch.where((row > 0) & (edge | (column == 0)), b, a)
        unit = x[index]
        spatial = compute_distance(unit, x[prediction], metric)
        spatial = spatial.masked_fill((row == 0) & (column == 0), torch.inf)
        temporal = compute_distance(unit, x[p], metric).masked_fill(index < height * width, torch.inf)
        source[index] = torch.where(temporal <= limit, p, torch.where(spatial <= limit, prediction, index))
        error[index] = torch.minimum(spatial, temporal)
    shape = frames, height, width
    keep = source == torch.arange(len(x), device=x.device)
    return Prediction(keep.view(shape), error.view(shape), source.view(shape))


def predict_anchored_in_time(pixels: Tensor, threshold: float, metric: str) -> Prediction:
    """Predict every unit like `predict_anchored`, but only from the same unit of the previous temporal patch."""
    x, limit = pixels.flatten(1, 2), threshold * _ROUNDING
    reference, (count, units) = x[0], x.shape[:2]
    source = torch.arange(count * units, device=x.device).view(count, units)
    error = x.new_full(source.shape, torch.inf)
    for t in range(1, count):
        error[t] = compute_distance(x[t], reference, metric)
        same = error[t] <= limit
        source[t] = torch.where(same, source[t - 1], source[t])
        reference = torch.where(same[:, None], reference, x[t])
    keep = source.flatten() == torch.arange(count * units, device=x.device)
    shape = pixels.shape[:3]
    return Prediction(keep.view(shape), error.view(shape), source.view(shape))


@lru_cache(maxsize=16)
def _list_diagonals(frames: int, height: int, width: int) -> tuple[Tensor, ...]:
    """Return the flat indices of the units of each diagonal t + row + column, ascending, int64, on the host."""
    axes = [torch.arange(size, device="cpu") for size in (frames, height, width)]
    t, row, column = torch.meshgrid(*axes, indexing="ij")
    diagonal = (t + row + column).flatten()
    order = diagonal.argsort(stable=True)
    return order.split(diagonal.bincount().tolist())
