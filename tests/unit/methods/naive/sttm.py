# SPDX-License-Identifier: Apache-2.0
"""Naive recursion and loops of STTM (arXiv 2507.07990)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from method_rows import Video
from videos import cos, mean

Box = tuple[int, int, int, int]  # first row, first column, rows, columns


def near(a: list[float], b: list[float]) -> float:
    return round(cos(a, b) * 2**20) / 2**20


def blocks(side: int) -> list[list[int]]:
    """Return pairs of indices. On an odd side, the first index is a single."""
    odd = side % 2
    return [[0]] * odd + [[i, i + 1] for i in range(odd, side, 2)]


class Square:
    def __init__(self, box: Box, value: list[float], parts: list[Square]) -> None:
        self.box, self.value, self.parts = box, value, parts

    def weights(self) -> dict[tuple[int, int], float]:
        if not self.parts:
            return {self.box[:2]: 1.0}
        return {cell: w / len(self.parts) for part in self.parts for cell, w in part.weights().items()}

    def tokens(self, threshold: float) -> list[Square]:
        if not self.parts:
            return [self]
        if len(self.parts) > 1 and all(near(part.value, self.value) >= threshold for part in self.parts):
            return [self]
        return [token for part in self.parts for token in part.tokens(threshold)]


def tops(frame: list[list[float]], height: int, width: int) -> list[Square]:
    level = [[Square((r, c, 1, 1), frame[r * width + c], []) for c in range(width)] for r in range(height)]
    while True:
        rows, columns = blocks(len(level)), blocks(len(level[0]))
        if min(len(rows), len(columns)) <= 2:
            return [square for row in level for square in row]
        coarser = []
        for row_group in rows:
            squares = []
            for column_group in columns:
                parts = [level[r][c] for r in row_group for c in column_group]
                (top, left, *_), (last_top, last_left, last_height, last_width) = parts[0].box, parts[-1].box
                squares.append(
                    Square(
                        (top, left, last_top + last_height - top, last_left + last_width - left),
                        mean([p.value for p in parts]),
                        parts,
                    )
                )
            coarser.append(squares)
        level = coarser


def within(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[0] + a[2] <= b[0] + b[2] and a[1] + a[3] <= b[1] + b[3]


def merged(trees: list[list[Square]], spatial: float, temporal: float) -> dict[int, list[tuple[int, Square]]]:
    """Return the members of each group of nodes, by the index of its representative.

    Nodes of consecutive frames are linked if a box contains the other and the cosine is at least `temporal`.
    """
    nodes = [(f, node) for f, roots in enumerate(trees) for root in roots for node in root.tokens(spatial)]
    nodes.sort(key=lambda node: (node[0], node[1].box[:2]))
    pairs = []
    for i, (f, a) in enumerate(nodes):
        for j, (g, b) in enumerate(nodes):
            if g == f + 1 and (within(a.box, b.box) or within(b.box, a.box)) and near(a.value, b.value) >= temporal:
                pairs.append((i, j))
    representative = [*range(len(nodes))]
    while True:
        updated = [*representative]
        for i, j in pairs:
            smallest = min(representative[i], representative[j])
            updated[i], updated[j] = min(updated[i], smallest), min(updated[j], smallest)
        representative = [updated[i] for i in updated]
        if representative == [representative[i] for i in representative]:
            break
    groups: dict[int, list[tuple[int, Square]]] = {}
    for i, index in enumerate(representative):
        groups.setdefault(index, []).append(nodes[i])
    return groups


def naive(
    video: Tensor, attention: Any, keep: int, grid: tuple[int, int], spatial: float = 0.85, temporal: float = 0.55,
    exact: bool = True,
) -> dict[int, dict[int, float]]:  # fmt: skip
    """Build quadtrees and merge them over time. `exact` searches for thresholds that reach `keep` tokens."""
    x, (height, width) = video.tolist(), grid
    trees = [tops(frame, height, width) for frame in x]
    is_temporal = temporal > 0
    groups = merged(trees, 2, 2) if exact else merged(trees, spatial, temporal if is_temporal else 2)
    distances = [1 - spatial] + [1 - temporal] * is_temporal
    low, high = 0.0, 2 / min([distance for distance in distances if distance > 0], default=2.0)
    for _ in range(18 if exact else 0):
        scale = (low + high) / 2
        candidate = merged(trees, 1 - scale * distances[0], 1 - scale * distances[1] if is_temporal else 2)
        if len(candidate) >= keep:
            low, groups = scale, candidate
        else:
            high = scale
        if len(candidate) == keep:
            break
    merged_groups = [*groups.values()]
    means = [mean([square.value for _, square in group]) for group in merged_groups]
    if exact:
        best = {
            i: max(((near(means[i], means[j]), -j) for j in range(i)), default=(-math.inf, 0))
            for i in range(len(merged_groups))
        }
        for i in sorted(range(1, len(merged_groups)), key=lambda i: (-best[i][0], i))[: len(merged_groups) - keep]:
            merged_groups[i] = merged_groups[i] + [(-best[i][1], None)]
        for i in range(len(merged_groups) - 1, 0, -1):  # a node joins an earlier node
            if merged_groups[i][-1][1] is None:
                merged_groups[merged_groups[i][-1][0]][:0] = merged_groups[i][:-1]
                merged_groups[i] = []
    result = {}
    for group in filter(None, merged_groups):
        weights = {
            f * height * width + r * width + c: w / len(group)
            for f, square in group for (r, c), w in square.weights().items()
        }  # fmt: skip
        first = min((f, square.box[:2]) for f, square in group)
        result[first[0] * height * width + first[1][0] * width + first[1][1]] = weights
    return result


ROWS = {
    "sttm": Video(
        naive=naive,
        by_grid=True,
        tried=({"spatial": 0.9, "temporal": 0.9}, {"temporal": 0.0}, {"spatial": 1.5}, {"temporal": 0.2}),
        refused=({"layer": 0}, {"layer": "2"}, {"spatial": -2}, {"temporal": 3}, {"exact": 1}),
    )
}
