# SPDX-License-Identifier: Apache-2.0
"""prunevid: a loop written from its description."""

from __future__ import annotations

import math
from itertools import combinations, groupby
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_peaks, naive_shares
from videos import best, cos, mean


def contiguous(labels: list[int]) -> list[int]:
    """Step 2: labels of frames as scenes, frame by frame."""
    count = len(labels)

    def run(of: list[int | None], f: int) -> list[int]:
        """The unbroken run of frames of one label around `f`."""
        first = last = f
        while first and of[first - 1] == of[f]:
            first -= 1
        while last + 1 < count and of[last + 1] == of[f]:
            last += 1
        return [*range(first, last + 1)]

    longest = {label: max(len(run(labels, f)) for f in range(count) if labels[f] == label) for label in set(labels)}
    made = [label if len(run(labels, f)) == longest[label] > 1 else None for f, label in enumerate(labels)]
    while None in made:
        stretch = run(made, made.index(None))
        left, right = stretch[0] - 1, stretch[-1] + 1
        long_left = len(run(made, left)) if left >= 0 else 0
        long_right = len(run(made, right)) if right < count else 0
        to = 0 if long_left == long_right == 0 else made[left] if long_left >= long_right else made[right]
        made[stretch[0] : stretch[-1] + 1] = [to] * len(stretch)
    return made


def spans_of(labels: list[int]) -> list[list[int]]:
    """The frames of each maximal run of one label."""
    return [[f for f, _ in run] for _, run in groupby(enumerate(labels), key=lambda one: one[1])]


def gathered(points: dict[int, list[float]], number: int) -> dict[int, int]:
    """Steps 1 and 4: DPC-KNN of 7 neighbours; of each point the nearest centre, none where no centre is to be had."""
    keys = [*points]
    centres = [keys[i] for i in naive_peaks([points[i] for i in keys], number, 7)] if number else []
    return {
        i: i if i in centres else min(centres, key=lambda c: (math.dist(points[i], points[c]), c))
        for i in keys if centres
    }  # fmt: skip


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any = None, threshold: float = 0.8) -> dict[int, dict]:
    frames, places = video.shape[:2]
    x = video.tolist()
    label = gathered(dict(enumerate(mean(frame) for frame in x)), max(1, frames // 4))
    spans = {f: span for span in spans_of(contiguous([label[f] for f in range(frames)])) for f in span}
    still = {}
    for f in range(frames):
        still[f] = []
        for p in range(places):
            pairs = [cos(x[g][p], x[h][p]) for g, h in combinations(spans[f], 2)]
            if pairs and math.fsum(pairs) / len(pairs) > threshold:
                still[f].append(p)
    copies = {(spans[f][0], p): list(spans[f]) for f in range(frames) for p in still[f]}
    later = {f * places + p: -cos(x[f][p], x[f - 1][p]) for f in range(frames) for p in still[f] if f != spans[f][0]}
    alone = best(later, later, keep - (frames * places - len(later)))
    groups = {i: {i: 1.0} for i in alone}
    for (_, p), of in copies.items():
        of[:] = [f for f in of if f * places + p not in alone]
    kinds: list[tuple[int, list[int], bool]] = []
    for f in range(frames):
        kinds += [(f, still[f] if f == spans[f][0] else [], True)]
        kinds += [(f, [p for p in range(places) if p not in still[f]], False)]
    sizes = [len(of) for _, of, _ in kinds]
    wanted = [float(max(0, (n if n <= 14 else n // 2) - 1)) for n in sizes]
    for (f, of, stands), n in zip(kinds, naive_shares(wanted, keep - len(alone), sizes, 1), strict=True):
        tokens = {p: copies[f, p] if stands else [f] for p in of}
        joined = gathered({p: mean([x[g][p] for g in tokens[p]]) for p in of}, n)
        for p, centre in joined.items():
            part = 1 / sum(one == centre for one in joined.values()) / len(tokens[p])
            groups.setdefault(f * places + centre, {}).update({g * places + p: part for g in tokens[p]})
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
