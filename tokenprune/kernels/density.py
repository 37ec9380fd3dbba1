# SPDX-License-Identifier: Apache-2.0
"""Density peaks of tokens, the centres of DPC-KNN clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.host_checks import is_all_finite, is_all_true
from tokenprune.kernels.pairs import distances, is_finite
from tokenprune.kernels.take import top_mask

if TYPE_CHECKING:
    from torch import Tensor


def density_peaks(
    x: Tensor, mask: Tensor, count: Tensor, neighbours: int, max_count: int, capped: bool = False
) -> Tensor:
    """Select the density peaks of each segment as cluster centres (DPC-KNN).

    The density of a token is `exp(-mean(d^2))` over its nearest neighbors, including itself. Its peak distance is the
    distance to the nearest denser token, or the largest distance if no token is denser. Centres have the largest
    products of both. Distances are Euclidean, divided by sqrt(D). Ties go to the lower index, and non-finite tokens
    come last. Memory is O(N^2).

    Args:
        x: Tokens, `[S, N, D]`.
        mask: Valid tokens, bool `[S, N]`.
        count: Number of centres, long `[S]`.
        neighbours: Number of neighbors in the density.
        max_count: Maximum of `count`.
        capped: Limit the neighbors to the number of centres.

    Returns:
        Centres, bool `[S, N]`.

    Source:
        Rodriguez and Laio, "Clustering by fast search and find of density peaks" (Science 344, 2014), with the density
        of Du et al., "Study on density peaks clustering based on k-nearest neighbors and PCA" (2016).
    """
    points, is_masked = x.float(), None
    if not (is_all_true(mask) and is_all_finite(x)):
        barred = ~(mask & is_finite(x))
        points, is_masked = points.masked_fill(barred.unsqueeze(-1), 0), barred.unsqueeze(1) | barred.unsqueeze(2)
    distance = distances(points, points) / x.shape[-1] ** 0.5
    if is_masked is not None:
        distance = distance.masked_fill(is_masked, torch.inf)
    nearest = distance.topk(min(neighbours, x.shape[1]), dim=2, largest=False).values.square()
    # Log density, because the density of isolated tokens would underflow to 0.
    density = -_mean_of_known(nearest, count if capped else None)
    if is_masked is not None:
        density = density.masked_fill(barred, -torch.inf)
    peak = _measure_peaks(distance, density, is_masked)
    score = (density + peak.log()).clamp(min=torch.finfo(torch.float32).min)
    if is_masked is not None:
        score = score.masked_fill(barred, -torch.inf)
    return top_mask(score, mask, count, max_count)


def _mean_of_known(nearest: Tensor, limit: Tensor | None) -> Tensor:
    """Return the mean of the finite entries along the last axis, of the first `limit` ones if it is given."""
    known = _find_known(nearest, limit)
    if is_all_true(known):
        return nearest.sum(2) / nearest.shape[2]
    return nearest.masked_fill(~known, 0).sum(2) / known.sum(2).clamp(min=1)


def _find_known(values: Tensor, limit: Tensor | None) -> Tensor:
    """Return the mask of finite entries among the first `limit` of each row. values: `[S, N, K]`; limit: long `[S]`."""
    if values.device.type == "cpu":
        from tokenprune.kernels import host_loops

        return host_loops.find_known(values, limit)
    known = values < torch.inf
    if limit is not None:
        known &= torch.arange(values.shape[2], device=values.device) < limit.clamp(min=1)[:, None, None]
    return known


def _measure_peaks(distance: Tensor, density: Tensor, is_masked: Tensor | None) -> Tensor:
    """Return the distance to the nearest denser token. See `host_loops.measure_peaks`."""
    if distance.device.type == "cpu":
        from tokenprune.kernels import host_loops

        return host_loops.measure_peaks(distance, density, is_masked)
    assert is_masked is not None  # only the CPU checks whether it is needed
    order = density.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    # Only denser tokens count.
    peak = distance.masked_fill(order.unsqueeze(1) >= order.unsqueeze(2), torch.inf).amin(2)
    farthest = distance.masked_fill(is_masked, -torch.inf).amax(2)
    return torch.where(peak < torch.inf, peak, farthest)
