# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FlashVID (arXiv 2602.08024)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_segments, naive_shares
from videos import best, clusters, cos, mean


def far_apart(frame: list[list[float]], attention: list[float], count: int) -> list[int]:
    """ADTS: greedy max-min over the distances, scaled by the candidate's attention."""
    distance = [[1 - cos(a, b) for b in frame] for a in frame]
    picks: list[int] = []
    for _ in range(count):
        score = {}
        for j in range(len(frame)):
            others = picks or [i for i in range(len(frame)) if i != j]
            score[j] = attention[j] * min((distance[i][j] for i in others), default=2.0)
        picks += best([j for j in score if j not in picks], score, 1)
    return picks


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: Any = None, picks: float = 0.7, threshold: float = 0.8
) -> dict[int, dict]:
    """Pick tokens of each frame by ADTS, link the others into trees (TSTM), and cluster the trees of each frame."""
    frames, num_cells = video.shape[:2]
    x, a = video.tolist(), attention.tolist()
    means = [mean(frame) for frame in x]
    ends = naive_segments([cos(p, q) for p, q in pairwise(means)], math.ceil(frames / 4), 0.9)
    segments: list[list[int]] = [[]]
    for f in range(frames):
        segments[-1].append(f)
        if f + 1 < frames and ends[f]:
            segments.append([])
    budget = naive_shares([1.0] * frames, keep, [num_cells] * frames, 0)
    num_picked = [math.ceil(b * picks - 1e-9) for b in budget]
    picked = [far_apart(x[f], a[f], num_picked[f]) for f in range(frames)]
    rest = [[p for p in range(num_cells) if p not in picked[f]] for f in range(frames)]
    groups = {f * num_cells + p: {f * num_cells + p: 1.0} for f in range(frames) for p in picked[f]}
    for segment in segments:
        num_merged = sum(budget[f] - num_picked[f] for f in segment)
        links = {}
        for f in segment[1:]:
            for p in rest[f]:
                if rest[f - 1]:
                    similarity = {q: cos(x[f][p], x[f - 1][q]) for q in rest[f - 1]}
                    (q,) = best(rest[f - 1], similarity, 1)
                    if similarity[q] > threshold:
                        links[f, p] = (similarity[q], q)
        max_links = sum(len(rest[f]) for f in segment) - num_merged
        strongest = sorted(links, key=lambda node: (-links[node][0], node))[:max_links]
        links = {node: links[node] for node in strongest}
        trees: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for f in segment:
            for p in rest[f]:
                root = (f, p)
                while root in links:
                    root = (root[0] - 1, links[root][1])
                trees.setdefault(root, []).append((f, p))
        roots_of_frame = [[p for g, p in trees if g == f] for f in segment]
        counts = naive_shares([float(len(t)) for t in roots_of_frame], num_merged, [len(t) for t in roots_of_frame], 1)
        for f, roots, n in zip(segment, roots_of_frame, counts, strict=True):
            centers = clusters({p: mean([x[g][q] for g, q in trees[f, p]]) for p in roots}, n)
            for p, center in centers.items():
                num_members = sum(other == center for other in centers.values())
                group = groups.setdefault(f * num_cells + center, {})
                group.update({g * num_cells + q: 1 / len(trees[f, p]) / num_members for g, q in trees[f, p]})
    return groups


ROWS = {
    "flashvid": Video(
        naive=naive,
        unchanged=("unit of attention",),
        always={"inner": False},
        tried=({"threshold": 1.0}, {"threshold": -1.0}, {"picks": 0.2}, {"picks": 1.0}),
        refused=({"layer": 5, "inner": False},),
    )
}
