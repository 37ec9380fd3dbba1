# SPDX-License-Identifier: Apache-2.0
"""Naive loop of KiToke (arXiv 2604.03414)."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from videos import best, cos


def crowding(x: list[list[float]], alpha: float = 0.16) -> tuple[list[float], float]:
    """Return each token's kernel density, and the median distance as the unit."""
    distance = [[math.dist(a, b) for b in x] for a in x]
    unit = statistics.median_low(distance[i][j] for i in range(len(x)) for j in range(i)) if len(x) > 1 else 1.0
    return [math.fsum(math.exp(-(d**2) / (alpha * unit**2)) for d in row) for row in distance], unit


def intervals(x: list[list[list[float]]], unit: float, change: float = 1.5, jump: float = 1.0) -> list[int]:
    """Return the interval index of each frame. A new interval starts at large changes."""
    steps = []
    for before, after in pairwise(x):
        aligned_distance = math.fsum(map(math.dist, before, after)) / len(before)
        nearest_distance = math.fsum(min(math.dist(a, b) for b in after) for a in before) / len(before)
        steps.append((aligned_distance + nearest_distance) / unit)
    labels = [0]
    for t, step in enumerate(steps):
        others = steps[max(0, t - 1) : t] + steps[t + 1 : t + 2]
        cut = step > change or any(step - other > jump and step > 1.4 * other for other in others)
        labels.append(labels[-1] + cut)
    return labels


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any, kept: list[int] | None = None) -> dict[int, dict]:
    """Merge each token into the most similar kept token of its interval, weighted by 1 / density.

    kept: sampled tokens. None keeps the tokens of lowest density.
    """
    num_cells = video.shape[1]
    x = video.flatten(0, 1).tolist()
    density, unit = crowding(x)
    rarity = [1 / value for value in density]
    kept = best(range(len(x)), rarity, keep) if kept is None else kept
    interval = intervals(video.tolist(), unit)
    used_intervals = sorted({interval[i // num_cells] for i in kept})
    groups: dict[int, dict[int, float]] = {}
    for i in range(len(x)):
        nearest = min(used_intervals, key=lambda n: (abs(n - interval[i // num_cells]), n))
        candidates = [j for j in kept if interval[j // num_cells] == nearest]
        target = i if i in kept else best(candidates, {j: cos(x[i], x[j]) for j in candidates}, 1)[0]
        groups.setdefault(target, {})[i] = rarity[i]
    return {
        kept_token: {i: w / math.fsum(group.values()) for i, w in group.items()} for kept_token, group in groups.items()
    }


ROWS = {"kitoke": Video(naive=naive, always={"sample": False})}
