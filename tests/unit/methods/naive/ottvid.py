# SPDX-License-Identifier: Apache-2.0
"""Naive loop of OTT-Vid (arXiv 2605.11803)."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_shares_in_rounds
from tokenprune.methods.video.ottvid import count_picks
from videos import best, cos


def cover(similarity: list[list[float]], weight: list[float], picks: list[int]) -> float:
    """Return the weighted facility-location value of a set."""
    return math.fsum(w * max([0.0, *(row[j] for j in picks)]) for w, row in zip(weight, similarity, strict=True))


def sinkhorn(cost: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the transport plan of 200 Sinkhorn rounds with eps 0.01. Each round scales the columns, then the rows."""
    u = np.zeros(len(rows))
    for _ in range(200):
        v = 0.01 * (np.log(columns) - np.logaddexp.reduce((u[:, None] - cost) / 0.01, axis=0))
        u = 0.01 * (np.log(rows) - np.logaddexp.reduce((v[None] - cost) / 0.01, axis=1))
    return np.exp((u[:, None] + v[None] - cost) / 0.01)


def softmax(values: list[float]) -> np.ndarray:
    exponentials = np.exp(np.array(values) - max(values))
    return exponentials / exponentials.sum()


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: tuple[int, int], threshold: float = 0.3
) -> dict[int, dict]:
    """Pick k tokens per frame by facility location, then merge pairs of frames along their transport plans."""
    frames, num_cells = video.shape[:2]
    height, width = grid
    x = video.tolist()
    k = count_picks(keep, [num_cells] * frames)
    coordinates = [(p // width / max(1, height - 1), p % width / max(1, width - 1)) for p in range(num_cells)]
    picks, masses = [], []
    for f in range(frames):
        similarity = [[cos(a, b) for b in x[f]] for a in x[f]]
        weight = (attention[f] / attention[f].sum()).tolist()
        picked: list[int] = []
        for _ in range(k):
            gain = {j: cover(similarity, weight, [*picked, j]) for j in range(num_cells) if j not in picked}
            picked += best(gain, gain, 1)
        picked.sort()
        losses = [
            cover(similarity, weight, picked) - cover(similarity, weight, [j for j in picked if j != i]) for i in picked
        ]
        picks.append(picked)
        masses.append(softmax([-loss / (max(losses) or 1.0) / 0.3 for loss in losses]))
    plans, costs, transport_cost = [], [], []
    for f in range(frames - 1):
        mean = math.fsum(cos(a, b) for a, b in zip(x[f], x[f + 1], strict=True)) / num_cells
        alpha = 0.5 + 0.5 * min(1, max(0, 1 - mean))
        cost = [
            [
                alpha * (1 - max(0.0, cos(x[f][i], x[f + 1][j])))
                + (1 - alpha) * math.dist(coordinates[i], coordinates[j]) / math.sqrt(2)
                for j in picks[f + 1]
            ]
            for i in picks[f]
        ]
        costs.append(np.array(cost))
        plans.append(sinkhorn(costs[-1], masses[f], masses[f + 1]))
        transport_cost.append(float((plans[-1] * costs[-1]).sum()))
    num_removed = frames * k - keep
    max_removed = k - 1 if keep >= frames else k
    weights = [float(w) for w in softmax([-w / 0.3 for w in transport_cost])] if transport_cost else []
    num_removed_per_pair = naive_shares_in_rounds(weights, num_removed, [max_removed] * len(transport_cost))
    targets: dict[int, int | None] = {}
    for f, remaining in enumerate(num_removed_per_pair):
        entries = [(i, j) for i in range(k) for j in range(k)]
        for i, j in sorted(entries, key=lambda e: -plans[f][e]):
            source = (f + 1) * num_cells + picks[f + 1][j]
            if remaining and source not in targets:
                targets[source] = f * num_cells + picks[f][i] if costs[f][i, j] <= threshold else None
                remaining -= 1
    groups: dict[int, list[int]] = {}
    for f in range(frames):
        for p in picks[f]:
            root: int | None = f * num_cells + p
            while root in targets:
                root = targets[root]
            if root is not None:
                groups.setdefault(root, []).append(f * num_cells + p)
    return {root: {i: 1 / len(group) for i in group} for root, group in groups.items()}


ROWS = {
    "ottvid": Video(
        naive=naive,
        tried=({"threshold": 0.05}, {"threshold": math.inf}),
        unchanged=("unit of attention", "unit of tokens"),
    )
}
