# SPDX-License-Identifier: Apache-2.0
"""Naive loop of PruneVid (arXiv 2412.16117)."""

from __future__ import annotations

import math
from itertools import combinations, groupby
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_peaks, naive_shares
from videos import best, cos, mean


def contiguous(labels: list[int]) -> list[int]:
    """Turn frame labels into contiguous scenes: keep the longest runs of each label, and fill the rest from them."""
    count = len(labels)

    def run(frame_labels: list[int | None], f: int) -> list[int]:
        """Return the run of frames around `f` with the same label."""
        first = last = f
        while first and frame_labels[first - 1] == frame_labels[f]:
            first -= 1
        while last + 1 < count and frame_labels[last + 1] == frame_labels[f]:
            last += 1
        return [*range(first, last + 1)]

    longest = {label: max(len(run(labels, f)) for f in range(count) if labels[f] == label) for label in set(labels)}
    scenes = [label if len(run(labels, f)) == longest[label] > 1 else None for f, label in enumerate(labels)]
    while None in scenes:
        gap = run(scenes, scenes.index(None))
        left, right = gap[0] - 1, gap[-1] + 1
        left_length = len(run(scenes, left)) if left >= 0 else 0
        right_length = len(run(scenes, right)) if right < count else 0
        label_of_gap = (
            0 if left_length == right_length == 0 else scenes[left] if left_length >= right_length else scenes[right]
        )
        scenes[gap[0] : gap[-1] + 1] = [label_of_gap] * len(gap)
    return scenes


def spans_of(labels: list[int]) -> list[list[int]]:
    """Return the frames of each maximal run of a label."""
    return [[f for f, _ in run] for _, run in groupby(enumerate(labels), key=lambda pair: pair[1])]


def gathered(points: dict[int, list[float]], num_centers: int) -> dict[int, int]:
    """Return the nearest center of each point by DPC-KNN with 7 neighbors, or no entries without a center."""
    keys = [*points]
    centers = [keys[i] for i in naive_peaks([points[i] for i in keys], num_centers, 7)] if num_centers else []
    return {
        i: i if i in centers else min(centers, key=lambda c: (math.dist(points[i], points[c]), c))
        for i in keys if centers
    }  # fmt: skip


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any = None, threshold: float = 0.8) -> dict[int, dict]:
    """Average the static cells of each scene over time, then cluster the static and moving tokens of each frame."""
    frames, num_cells = video.shape[:2]
    x = video.tolist()
    label = gathered(dict(enumerate(mean(frame) for frame in x)), max(1, frames // 4))
    spans = {f: span for span in spans_of(contiguous([label[f] for f in range(frames)])) for f in span}
    static_cells = {}
    for f in range(frames):
        static_cells[f] = []
        for p in range(num_cells):
            pairs = [cos(x[g][p], x[h][p]) for g, h in combinations(spans[f], 2)]
            if pairs and math.fsum(pairs) / len(pairs) > threshold:
                static_cells[f].append(p)
    copies = {(spans[f][0], p): list(spans[f]) for f in range(frames) for p in static_cells[f]}
    later = {
        f * num_cells + p: -cos(x[f][p], x[f - 1][p])
        for f in range(frames)
        for p in static_cells[f]
        if f != spans[f][0]
    }
    unmerged = best(later, later, keep - (frames * num_cells - len(later)))
    groups = {i: {i: 1.0} for i in unmerged}
    for (_, p), copy_frames in copies.items():
        copy_frames[:] = [f for f in copy_frames if f * num_cells + p not in unmerged]
    parts: list[tuple[int, list[int], bool]] = []
    for f in range(frames):
        parts += [(f, static_cells[f] if f == spans[f][0] else [], True)]
        parts += [(f, [p for p in range(num_cells) if p not in static_cells[f]], False)]
    sizes = [len(cells) for _, cells, _ in parts]
    weights = [float(max(0, (n if n <= 14 else n // 2) - 1)) for n in sizes]
    for (f, cells, is_static), n in zip(parts, naive_shares(weights, keep - len(unmerged), sizes, 1), strict=True):
        tokens = {p: copies[f, p] if is_static else [f] for p in cells}
        centers = gathered({p: mean([x[g][p] for g in tokens[p]]) for p in cells}, n)
        for p, center in centers.items():
            part = 1 / sum(other == center for other in centers.values()) / len(tokens[p])
            groups.setdefault(f * num_cells + center, {}).update({g * num_cells + p: part for g in tokens[p]})
    return groups


ROWS = {
    "prunevid": Video(
        naive=naive,
        unchanged=("unit of attention",),
        always={"inner": False},
        tried=({"threshold": 0.2}, {"threshold": 0.99}),
        refused=({"layer": 3, "inner": False},),
    )
}
