# SPDX-License-Identifier: Apache-2.0
"""Naive loop of PACT (arXiv 2504.08966)."""

from __future__ import annotations

import math

from torch import Tensor

from method_rows import Row

Groups = tuple[list[int], dict[int, int]]


def distance(a: Tensor, b: Tensor) -> float:
    length = float(a.norm() * b.norm())
    return max(0.0, 1 - round(float(a @ b) / length * 2**20) / 2**20)


def centres(distances: list[list[float]], order: list[int], cutoff: float) -> list[int]:
    """Visit tokens by falling density. A token is a center if no earlier center lies within `cutoff` (DBDPC)."""
    centers: list[int] = []
    for i in order:
        if not any(distances[i][j] <= cutoff for j in centers):
            centers.append(i)
    return centers


def naive(
    score: list[float], keys: Tensor, keep: int, share: float = 0.55, cutoff: float | None = None, reach: float = 1.5
) -> Groups:
    """Return the kept tokens of an image and the target of each merged token. keys: `[n, D]`.

    cutoff: None searches for the cutoff with `keep` centers. Unimportant tokens join a center within reach * cutoff.
    """
    n, is_searched = len(score), cutoff is None
    important_share = min(1.0, max(share, 1.5 * keep / n)) if is_searched else share
    important = sorted(range(n), key=lambda i: (-score[i], i))[: max(1, int(important_share * n))]
    distances = [[0.0 if i == j else distance(keys[i], keys[j]) for j in range(n)] for i in range(n)]
    density = {i: sum(math.exp(-((distances[i][j] / 2) ** 2)) for j in important) for i in important}
    order = sorted(important, key=lambda i: (-density[i], i))
    low, high = (0.0, 2.0) if is_searched else (cutoff, cutoff)
    for _ in range(16 if is_searched else 0):
        radius = (low + high) / 2
        num_centers = len(centres(distances, order, radius))
        low, high = (radius, high) if num_centers >= keep else (low, radius)
        if num_centers == keep:
            break
    chosen = centres(distances, order, low)
    if is_searched:
        chosen = (chosen + [i for i in order if i not in chosen])[:keep]
    targets = {}
    for i in range(n):
        nearest = min(chosen, key=lambda j: (round(distances[i][j], 6), j))
        if i not in chosen and (i in important or distances[i][nearest] <= reach * low):
            targets[i] = nearest
    return sorted(chosen), targets


ROWS = {
    "pact": Row(
        refused=({"layer": 0}, {"share": 0}, {"share": 1.5}, {"cutoff": 3.0}, {"cutoff": "far"}, {"reach": -1.0}),
    )
}
