# SPDX-License-Identifier: Apache-2.0
"""ottvid: a loop written from its description."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_shares_in_rounds
from tokenprune.methods.video.ottvid import count_picks
from videos import best, cos


def cover(alike: list[list[float]], weight: list[float], taken: list[int]) -> float:
    return math.fsum(w * max([0.0, *(row[j] for j in taken)]) for w, row in zip(weight, alike, strict=True))


def sinkhorn(cost: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The columns first in each round, the masses of the later frame, and then the rows."""
    u = np.zeros(len(rows))
    for _ in range(200):
        v = 0.01 * (np.log(columns) - np.logaddexp.reduce((u[:, None] - cost) / 0.01, axis=0))
        u = 0.01 * (np.log(rows) - np.logaddexp.reduce((v[None] - cost) / 0.01, axis=1))
    return np.exp((u[:, None] + v[None] - cost) / 0.01)


def softmax(values: list[float]) -> np.ndarray:
    made = np.exp(np.array(values) - max(values))
    return made / made.sum()


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: tuple[int, int], threshold: float = 0.3
) -> dict[int, dict]:
    frames, places = video.shape[:2]
    height, width = grid
    x = video.tolist()
    k = count_picks(keep, [places] * frames)
    where = [(p // width / max(1, height - 1), p % width / max(1, width - 1)) for p in range(places)]
    picks, masses = [], []
    for f in range(frames):
        alike = [[cos(a, b) for b in x[f]] for a in x[f]]
        weight = (attention[f] / attention[f].sum()).tolist()
        taken: list[int] = []
        for _ in range(k):
            gain = {j: cover(alike, weight, [*taken, j]) for j in range(places) if j not in taken}
            taken += best(gain, gain, 1)
        taken.sort()
        lost = [cover(alike, weight, taken) - cover(alike, weight, [j for j in taken if j != i]) for i in taken]
        picks.append(taken)
        masses.append(softmax([-one / (max(lost) or 1.0) / 0.3 for one in lost]))
    plans, costs, work = [], [], []
    for f in range(frames - 1):
        mean = math.fsum(cos(a, b) for a, b in zip(x[f], x[f + 1], strict=True)) / places
        alpha = 0.5 + 0.5 * min(1, max(0, 1 - mean))
        cost = [
            [
                alpha * (1 - max(0.0, cos(x[f][i], x[f + 1][j])))
                + (1 - alpha) * math.dist(where[i], where[j]) / math.sqrt(2)
                for j in picks[f + 1]
            ]
            for i in picks[f]
        ]
        costs.append(np.array(cost))
        plans.append(sinkhorn(costs[-1], masses[f], masses[f + 1]))
        work.append(float((plans[-1] * costs[-1]).sum()))
    gone = frames * k - keep
    few = k - 1 if keep >= frames else k
    weights = [float(w) for w in softmax([-w / 0.3 for w in work])] if work else []
    shared = naive_shares_in_rounds(weights, gone, [few] * len(work))
    goes: dict[int, int | None] = {}
    for f, number in enumerate(shared):
        entries = [(i, j) for i in range(k) for j in range(k)]
        for i, j in sorted(entries, key=lambda e: -plans[f][e]):
            source = (f + 1) * places + picks[f + 1][j]
            if number and source not in goes:
                goes[source] = f * places + picks[f][i] if costs[f][i, j] <= threshold else None
                number -= 1
    groups: dict[int, list[int]] = {}
    for f in range(frames):
        for p in picks[f]:
            root: int | None = f * places + p
            while root in goes:
                root = goes[root]
            if root is not None:
                groups.setdefault(root, []).append(f * places + p)
    return {root: {i: 1 / len(group) for i in group} for root, group in groups.items()}


ROWS = {
    "ottvid": Video(
        naive=naive,
        tried=({"threshold": 0.05}, {"threshold": math.inf}),
        unchanged=("unit of attention", "unit of tokens"),
    )
}
