# SPDX-License-Identifier: Apache-2.0
"""framefusion: a loop written from its description."""

from __future__ import annotations

from torch import Tensor

from method_rows import Video
from tests.unit.methods.test_methods import naive_uniform
from videos import best, cos


def naive(video: Tensor, attention: Tensor, keep: int, grid: tuple[int, int]) -> dict[int, dict]:
    frames, places = video.shape[:2]
    x = video.tolist()
    alike = {f * places + p: cos(x[f][p], x[f - 1][p]) for f in range(1, frames) for p in range(places)}
    merged = best(alike, alike, frames * places - keep)
    first = naive_uniform(keep, (1, *grid)) if keep < places else list(range(places))
    groups: dict[int, dict] = {}
    for p in range(places):
        head = p
        for f in range(frames):
            i = f * places + p
            head = head if i in merged else i
            if head >= places or head in first:
                groups.setdefault(head, {})[i] = 1.0
    return {head: {i: 1 / len(group) for i in group} for head, group in groups.items()}


ROWS = {"framefusion": Video(naive=naive, unchanged=("unit of attention", "unit of tokens"), by_grid=True)}
