# SPDX-License-Identifier: Apache-2.0
"""Naive loops of the token pool of arXiv 2603.21957."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_peaks
from videos import best, cos


def near(a: list[float], b: list[float]) -> float:
    return round(cos(a, b) * 2**20) / 2**20


def pool_of(x: list[list[float]], attention: list[float], size: int, threshold: float) -> list[int]:
    """Return a pool of dissimilar tokens by falling attention, filled with the next tokens if it is too small."""
    order, pool = best(range(len(x)), attention, len(x)), []
    for i in order:
        if len(pool) < size and all(near(x[i], x[j]) < threshold for j in pool):
            pool.append(i)
    return pool + [i for i in order if i not in pool][: size - len(pool)]


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: Any = None, threshold: float = 0.7, clusters: float = 0.3
) -> dict[int, dict[int, float]]:
    """Keep the pool, and merge the other tokens into density peaks."""
    x, a = video.flatten(0, 1).tolist(), attention.flatten().tolist()
    num_centers = math.floor(clusters * keep + 0.5)
    pool = pool_of(x, a, keep - num_centers, threshold)
    rest = [i for i in range(len(x)) if i not in pool]
    centers = [rest[i] for i in naive_peaks([x[i] for i in rest], num_centers, 5)] if num_centers else []
    members: dict[int, list[int]] = {i: [i] for i in [*pool, *centers]}
    for i in rest:
        if centers and i not in centers:
            members[min(centers, key=lambda c: (math.dist(x[i], x[c]), c))].append(i)
    return {kept_token: {i: 1 / len(group) for i in group} for kept_token, group in members.items()}


ROWS = {
    "unipool": Video(
        naive=naive,
        unchanged=("unit of attention", "order of heads"),
        always={"inner": False},
        tried=({"threshold": 1.5}, {"threshold": -1.0}, {"clusters": 0.0}, {"clusters": 1.0}, {"threshold": 0.2}),
        refused=(
            {"threshold": 2.5},
            {"clusters": -0.1},
            {"inner": True},
            {"inner": 1.0},
            {"balance": 2},
            {"inner_keep": 0},
        ),
    )
}
