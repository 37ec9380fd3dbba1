# SPDX-License-Identifier: Apache-2.0
"""sttm: a recursion and loops written from its description."""

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
    """Of an odd side the first stands alone."""
    odd = side % 2
    return [[0]] * odd + [[i, i + 1] for i in range(odd, side, 2)]


class Square:
    def __init__(self, box: Box, value: list[float], parts: list[Square]) -> None:
        self.box, self.value, self.parts = box, value, parts

    def weights(self) -> dict[tuple[int, int], float]:
        if not self.parts:
            return {self.box[:2]: 1.0}
        return {at: w / len(self.parts) for part in self.parts for at, w in part.weights().items()}

    def tokens(self, least: float) -> list[Square]:
        if not self.parts:
            return [self]
        if len(self.parts) > 1 and all(near(part.value, self.value) >= least for part in self.parts):
            return [self]
        return [one for part in self.parts for one in part.tokens(least)]


def tops(frame: list[list[float]], height: int, width: int) -> list[Square]:
    level = [[Square((r, c, 1, 1), frame[r * width + c], []) for c in range(width)] for r in range(height)]
    while True:
        rows, columns = blocks(len(level)), blocks(len(level[0]))
        if min(len(rows), len(columns)) <= 2:
            return [one for row in level for one in row]
        coarser = []
        for some in rows:
            line = []
            for others in columns:
                parts = [level[r][c] for r in some for c in others]
                (top, left, *_), (low, right, high, wide) = parts[0].box, parts[-1].box
                line.append(
                    Square((top, left, low + high - top, right + wide - left), mean([p.value for p in parts]), parts)
                )
            coarser.append(line)
        level = coarser


def within(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[0] + a[2] <= b[0] + b[2] and a[1] + a[3] <= b[1] + b[3]


def merged(trees: list[list[Square]], spatial: float, temporal: float) -> dict[int, list[tuple[int, Square]]]:
    """Of each node that stays, by index, those that it stands for."""
    nodes = [(f, one) for f, top in enumerate(trees) for root in top for one in root.tokens(spatial)]
    nodes.sort(key=lambda one: (one[0], one[1].box[:2]))
    pairs = []
    for i, (f, a) in enumerate(nodes):
        for j, (g, b) in enumerate(nodes):
            if g == f + 1 and (within(a.box, b.box) or within(b.box, a.box)) and near(a.value, b.value) >= temporal:
                pairs.append((i, j))
    rep = [*range(len(nodes))]
    while True:
        new = [*rep]
        for i, j in pairs:
            least = min(rep[i], rep[j])
            new[i], new[j] = min(new[i], least), min(new[j], least)
        rep = [new[one] for one in new]
        if rep == [rep[one] for one in rep]:
            break
    groups: dict[int, list[tuple[int, Square]]] = {}
    for i, one in enumerate(rep):
        groups.setdefault(one, []).append(nodes[i])
    return groups


def naive(
    video: Tensor, attention: Any, keep: int, grid: tuple[int, int], spatial: float = 0.85, temporal: float = 0.55,
    exact: bool = True,
) -> dict[int, dict[int, float]]:  # fmt: skip
    x, (height, width) = video.tolist(), grid
    trees = [tops(frame, height, width) for frame in x]
    time = temporal > 0
    groups = merged(trees, 2, 2) if exact else merged(trees, spatial, temporal if time else 2)
    apart = [1 - spatial] + [1 - temporal] * time
    low, high = 0.0, 2 / min([one for one in apart if one > 0], default=2.0)
    for _ in range(18 if exact else 0):
        middle = (low + high) / 2
        found = merged(trees, 1 - middle * apart[0], 1 - middle * apart[1] if time else 2)
        if len(found) >= keep:
            low, groups = middle, found
        else:
            high = middle
        if len(found) == keep:
            break
    one = [*groups.values()]
    means = [mean([square.value for _, square in group]) for group in one]
    if exact:
        best = {
            i: max(((near(means[i], means[j]), -j) for j in range(i)), default=(-math.inf, 0)) for i in range(len(one))
        }
        for i in sorted(range(1, len(one)), key=lambda i: (-best[i][0], i))[: len(one) - keep]:
            one[i] = one[i] + [(-best[i][1], None)]
        for i in range(len(one) - 1, 0, -1):  # what joins has joined what is before it
            if one[i][-1][1] is None:
                one[one[i][-1][0]][:0] = one[i][:-1]
                one[i] = []
    made = {}
    for group in filter(None, one):
        weights = {
            f * height * width + r * width + c: w / len(group)
            for f, square in group for (r, c), w in square.weights().items()
        }  # fmt: skip
        first = min((f, square.box[:2]) for f, square in group)
        made[first[0] * height * width + first[1][0] * width + first[1][1]] = weights
    return made


ROWS = {
    "sttm": Video(
        naive=naive,
        by_grid=True,
        tried=({"spatial": 0.9, "temporal": 0.9}, {"temporal": 0.0}, {"spatial": 1.5}, {"temporal": 0.2}),
        refused=({"layer": 0}, {"layer": "2"}, {"spatial": -2}, {"temporal": 3}, {"exact": 1}),
    )
}
