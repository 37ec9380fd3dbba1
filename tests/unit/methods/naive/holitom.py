# SPDX-License-Identifier: Apache-2.0
"""Naive loop of HoliTom (arXiv 2505.21334)."""

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


def still_places(is_static_step: list[list[bool]], begin: int, end: int) -> list[int]:
    """Return the cells that are static in frames `begin` to `end`, inclusive, from flags per pair of frames."""
    cells = range(len(is_static_step[0])) if is_static_step else []
    return [p for p in cells if end > begin and all(is_static_step[f][p] for f in range(begin, end))]


def windows(is_static_step: list[list[bool]], frames: int) -> list[tuple[int, int]]:
    """Return the partition of greatest gain by dynamic programming. Ties prefer the shortest last window."""
    gains, partitions = [0] * (frames + 1), [[] for _ in range(frames + 1)]
    for end in range(frames):
        gains[end + 1] = -1
        for begin in range(end, -1, -1):
            gain = gains[begin] + len(still_places(is_static_step, begin, end)) * (end - begin)
            if gain > gains[end + 1]:
                gains[end + 1], partitions[end + 1] = gain, [*partitions[begin], (begin, end)]
    return partitions[frames]


def naive(
    video: Tensor, attention: Tensor, keep: int, grid: Any, threshold: float | None = None, centre: float = 0.6
) -> dict[int, dict]:
    """Merge static cells over time, then keep the top attention of each frame and cluster the static cells."""
    frames, num_cells = video.shape[:2]
    if threshold is None:
        threshold = 0.65 if keep < frames * num_cells / 8 else 0.8
    x, a = video.tolist(), attention.tolist()
    similarity = [[cos(before[p], after[p]) for p in range(num_cells)] for before, after in pairwise(x)]
    partition = windows([[value > threshold for value in step] for step in similarity], frames)
    static_cells = {
        window: still_places([[value > threshold for value in s] for s in similarity], *window) for window in partition
    }
    copies = {(w, p): list(range(w[0], w[1] + 1)) for w in partition for p in static_cells[w]}
    gain = sum(len(frames_of_cell) - 1 for frames_of_cell in copies.values())
    # If merging leaves fewer than `keep` tokens, the tokens least similar to the previous frame are not merged.
    later = {
        f * num_cells + p: -similarity[f - 1][p]
        for (w, p), frames_of_cell in copies.items()
        for f in frames_of_cell[1:]
    }
    unmerged = best(later, later, keep - (frames * num_cells - gain))
    groups = {i: {i: 1.0} for i in unmerged}
    for (_, p), frames_of_cell in copies.items():
        frames_of_cell[:] = [f for f in frames_of_cell if f * num_cells + p not in unmerged]

    parts: list[tuple[Any, list[int]]] = []
    for w in partition:
        for f in range(w[0], w[1] + 1):
            parts += [
                (w, static_cells[w] if f == w[0] else []),
                (f, [p for p in range(num_cells) if p not in static_cells[w]]),
            ]
    sizes = [len(members) for _, members in parts]
    counts = naive_shares([float(n) for n in sizes], keep - len(unmerged), sizes, 1)
    for (part_key, members), num_kept in zip(parts, counts, strict=True):
        if isinstance(part_key, int):
            groups |= {
                part_key * num_cells + p: {part_key * num_cells + p: 1.0} for p in best(members, a[part_key], num_kept)
            }
            continue
        centers = clusters({p: mean([x[f][p] for f in copies[part_key, p]]) for p in members}, num_kept)
        for p, target in centers.items():
            num_others = sum(other == target for other in centers.values()) - 1
            weight = (centre if num_others else 1.0) if p == target else (1 - centre) / num_others
            group = groups.setdefault(part_key[0] * num_cells + target, {})
            group.update({f * num_cells + p: weight / len(copies[part_key, p]) for f in copies[part_key, p]})
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
