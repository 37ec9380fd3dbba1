# SPDX-License-Identifier: Apache-2.0
"""flashvid: a loop written from its description."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_segments, naive_shares
from videos import best, clusters, cos, mean


def far_apart(frame: list[list[float]], attention: list[float], number: int) -> list[int]:
    """Far from each other, by distance times the attention of the one that is looked at."""
    apart = [[1 - cos(a, b) for b in frame] for a in frame]
    taken: list[int] = []
    for _ in range(number):
        score = {}
        for j in range(len(frame)):
            others = taken or [i for i in range(len(frame)) if i != j]
            score[j] = attention[j] * min((apart[i][j] for i in others), default=2.0)
        taken += best([j for j in score if j not in taken], score, 1)
    return taken


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: Any = None, picks: float = 0.7, threshold: float = 0.8
) -> dict[int, dict]:
    frames, places = video.shape[:2]
    x, a = video.tolist(), attention.tolist()
    means = [mean(frame) for frame in x]
    ends = naive_segments([cos(p, q) for p, q in pairwise(means)], math.ceil(frames / 4), 0.9)
    segments: list[list[int]] = [[]]
    for f in range(frames):
        segments[-1].append(f)
        if f + 1 < frames and ends[f]:
            segments.append([])
    budget = naive_shares([1.0] * frames, keep, [places] * frames, 0)
    number = [math.ceil(b * picks - 1e-9) for b in budget]
    picked = [far_apart(x[f], a[f], number[f]) for f in range(frames)]
    rest = [[p for p in range(places) if p not in picked[f]] for f in range(frames)]
    groups = {f * places + p: {f * places + p: 1.0} for f in range(frames) for p in picked[f]}
    for segment in segments:
        wanted = sum(budget[f] - number[f] for f in segment)
        links = {}
        for f in segment[1:]:
            for p in rest[f]:
                if rest[f - 1]:
                    alike = {q: cos(x[f][p], x[f - 1][q]) for q in rest[f - 1]}
                    (q,) = best(rest[f - 1], alike, 1)
                    if alike[q] > threshold:
                        links[f, p] = (alike[q], q)
        room = sum(len(rest[f]) for f in segment) - wanted
        stay = sorted(links, key=lambda one: (-links[one][0], one))[:room]
        links = {one: links[one] for one in stay}
        trees: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for f in segment:
            for p in rest[f]:
                root = (f, p)
                while root in links:
                    root = (root[0] - 1, links[root][1])
                trees.setdefault(root, []).append((f, p))
        of_frame = [[p for g, p in trees if g == f] for f in segment]
        numbers = naive_shares([float(len(t)) for t in of_frame], wanted, [len(t) for t in of_frame], 1)
        for f, roots, n in zip(segment, of_frame, numbers, strict=True):
            of = clusters({p: mean([x[g][q] for g, q in trees[f, p]]) for p in roots}, n)
            for p, centre in of.items():
                many = sum(one == centre for one in of.values())
                group = groups.setdefault(f * places + centre, {})
                group.update({g * places + q: 1 / len(trees[f, p]) / many for g, q in trees[f, p]})
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
