# SPDX-License-Identifier: Apache-2.0
"""pact: a loop written from its description."""

from __future__ import annotations

import math

from torch import Tensor

from method_rows import Row

Groups = tuple[list[int], dict[int, int]]


def distance(a: Tensor, b: Tensor) -> float:
    length = float(a.norm() * b.norm())
    return max(0.0, 1 - round(float(a @ b) / length * 2**20) / 2**20)


def centres(apart: list[list[float]], order: list[int], cutoff: float) -> list[int]:
    """One after the other, by falling density: those that no centre so far is near to."""
    found: list[int] = []
    for i in order:
        if not any(apart[i][j] <= cutoff for j in found):
            found.append(i)
    return found


def naive(
    score: list[float], keys: Tensor, keep: int, share: float = 0.55, cutoff: float | None = None, reach: float = 1.5
) -> Groups:
    """Return the tokens of an image that stay, and the one that each joining token joins. keys: `[n, D]`."""
    n, exact = len(score), cutoff is None
    part = min(1.0, max(share, 1.5 * keep / n)) if exact else share
    matters = sorted(range(n), key=lambda i: (-score[i], i))[: max(1, int(part * n))]
    apart = [[0.0 if i == j else distance(keys[i], keys[j]) for j in range(n)] for i in range(n)]
    density = {i: sum(math.exp(-((apart[i][j] / 2) ** 2)) for j in matters) for i in matters}
    order = sorted(matters, key=lambda i: (-density[i], i))
    low, high = (0.0, 2.0) if exact else (cutoff, cutoff)
    for _ in range(16 if exact else 0):
        middle = (low + high) / 2
        number = len(centres(apart, order, middle))
        low, high = (middle, high) if number >= keep else (low, middle)
        if number == keep:
            break
    found = centres(apart, order, low)
    if exact:
        found = (found + [i for i in order if i not in found])[:keep]
    into = {}
    for i in range(n):
        nearest = min(found, key=lambda j: (round(apart[i][j], 6), j))
        if i not in found and (i in matters or apart[i][nearest] <= reach * low):
            into[i] = nearest
    return sorted(found), into


ROWS = {
    "pact": Row(
        refused=({"layer": 0}, {"share": 0}, {"share": 1.5}, {"cutoff": 3.0}, {"cutoff": "far"}, {"reach": -1.0}),
    )
}
