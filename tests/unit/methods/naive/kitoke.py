# SPDX-License-Identifier: Apache-2.0
"""kitoke: a loop written from its description."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from videos import best, cos


def crowding(x: list[list[float]], alpha: float = 0.16) -> tuple[list[float], float]:
    """For each token how crowded it is, and the unit of distances."""
    apart = [[math.dist(a, b) for b in x] for a in x]
    unit = statistics.median_low(apart[i][j] for i in range(len(x)) for j in range(i)) if len(x) > 1 else 1.0
    return [math.fsum(math.exp(-(d**2) / (alpha * unit**2)) for d in row) for row in apart], unit


def intervals(x: list[list[list[float]]], unit: float, change: float = 1.5, jump: float = 1.0) -> list[int]:
    steps = []
    for before, after in pairwise(x):
        same = math.fsum(map(math.dist, before, after)) / len(before)
        near = math.fsum(min(math.dist(a, b) for b in after) for a in before) / len(before)
        steps.append((same + near) / unit)
    made = [0]
    for t, step in enumerate(steps):
        others = steps[max(0, t - 1) : t] + steps[t + 1 : t + 2]
        cut = step > change or any(step - other > jump and step > 1.4 * other for other in others)
        made.append(made[-1] + cut)
    return made


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any, kept: list[int] | None = None) -> dict[int, dict]:
    """kept: what was drawn; None takes the least crowded."""
    places = video.shape[1]
    x = video.flatten(0, 1).tolist()
    crowded, unit = crowding(x)
    rarity = [1 / one for one in crowded]
    kept = best(range(len(x)), rarity, keep) if kept is None else kept
    of = intervals(video.tolist(), unit)
    filled = sorted({of[i // places] for i in kept})
    groups: dict[int, dict[int, float]] = {}
    for i in range(len(x)):
        nearest = min(filled, key=lambda n: (abs(n - of[i // places]), n))
        ours = [j for j in kept if of[j // places] == nearest]
        target = i if i in kept else best(ours, {j: cos(x[i], x[j]) for j in ours}, 1)[0]
        groups.setdefault(target, {})[i] = rarity[i]
    return {to: {i: w / math.fsum(group.values()) for i, w in group.items()} for to, group in groups.items()}


ROWS = {"kitoke": Video(naive=naive, always={"sample": False})}
