# SPDX-License-Identifier: Apache-2.0
"""holitom: a loop written from its description."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_shares
from videos import (
    best,
    clusters,
    cos,
    mean,
)  # fmt: skip


def still_places(steps: list[list[bool]], begin: int, end: int) -> list[int]:
    """Places that are still in the window of frames `begin` to `end`, both inside. steps: of each pair of frames."""
    places = range(len(steps[0])) if steps else []
    return [p for p in places if end > begin and all(steps[f][p] for f in range(begin, end))]


def windows(steps: list[list[bool]], frames: int) -> list[tuple[int, int]]:
    """The partition of greatest gain; of equal ones the last window is the shortest."""
    gains, found = [0] * (frames + 1), [[] for _ in range(frames + 1)]
    for end in range(frames):
        gains[end + 1] = -1
        for begin in range(end, -1, -1):
            gain = gains[begin] + len(still_places(steps, begin, end)) * (end - begin)
            if gain > gains[end + 1]:
                gains[end + 1], found[end + 1] = gain, [*found[begin], (begin, end)]
    return found[frames]


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: Any, threshold: float | None = None, centre: float = 0.6
) -> dict[int, dict]:
    frames, places = video.shape[:2]
    if threshold is None:
        threshold = 0.65 if keep < frames * places / 8 else 0.8
    x, a = video.tolist(), attention.tolist()
    alike = [[cos(before[p], after[p]) for p in range(places)] for before, after in pairwise(x)]
    cut = windows([[one > threshold for one in step] for step in alike], frames)
    still = {window: still_places([[one > threshold for one in s] for s in alike], *window) for window in cut}
    copies = {(w, p): list(range(w[0], w[1] + 1)) for w in cut for p in still[w]}
    gain = sum(len(one) - 1 for one in copies.values())
    # Where merging leaves less than is kept, those least like the one before stay.
    later = {f * places + p: -alike[f - 1][p] for (w, p), one in copies.items() for f in one[1:]}
    alone = best(later, later, keep - (frames * places - gain))
    groups = {i: {i: 1.0} for i in alone}
    for (_, p), one in copies.items():
        one[:] = [f for f in one if f * places + p not in alone]

    kinds: list[tuple[Any, list[int]]] = []
    for w in cut:
        for f in range(w[0], w[1] + 1):
            kinds += [(w, still[w] if f == w[0] else []), (f, [p for p in range(places) if p not in still[w]])]
    sizes = [len(one) for _, one in kinds]
    numbers = naive_shares([float(n) for n in sizes], keep - len(alone), sizes, 1)
    for (what, members), number in zip(kinds, numbers, strict=True):
        if isinstance(what, int):
            groups |= {what * places + p: {what * places + p: 1.0} for p in best(members, a[what], number)}
            continue
        of = clusters({p: mean([x[f][p] for f in copies[what, p]]) for p in members}, number)
        for p, target in of.items():
            others = sum(one == target for one in of.values()) - 1
            part = (centre if others else 1.0) if p == target else (1 - centre) / others
            group = groups.setdefault(what[0] * places + target, {})
            group.update({f * places + p: part / len(copies[what, p]) for f in copies[what, p]})
    return groups


ROWS = {
    "holitom": Video(
        naive=naive,
        unchanged=("unit of attention",),
        always={"inner": False},
        tried=({"threshold": 0.999}, {"threshold": -1.0}, {"centre": 1.0}, {"centre": 0.2}),
        refused=({"layer": 5, "inner": False},),
    )
}
