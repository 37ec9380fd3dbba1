# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FrameFusion (arXiv 2501.01986)."""

from __future__ import annotations

from torch import Tensor

from method_rows import Video
from tests.unit.methods.test_methods import naive_uniform
from videos import best, cos


def naive(video: Tensor, attention: Tensor, keep: int, grid: tuple[int, int]) -> dict[int, dict]:
    """Merge the tokens most similar to the same cell of the previous frame into the start of their chain."""
    frames, num_cells = video.shape[:2]
    x = video.tolist()
    similarity = {f * num_cells + p: cos(x[f][p], x[f - 1][p]) for f in range(1, frames) for p in range(num_cells)}
    merged = best(similarity, similarity, frames * num_cells - keep)
    first = naive_uniform(keep, (1, *grid)) if keep < num_cells else list(range(num_cells))
    groups: dict[int, dict] = {}
    for p in range(num_cells):
        head = p
        for f in range(frames):
            i = f * num_cells + p
            head = head if i in merged else i
            if head >= num_cells or head in first:
                groups.setdefault(head, {})[i] = 1.0
    return {head: {i: 1 / len(group) for i in group} for head, group in groups.items()}


ROWS = {"framefusion": Video(naive=naive, unchanged=("unit of attention", "unit of tokens"), by_grid=True)}
