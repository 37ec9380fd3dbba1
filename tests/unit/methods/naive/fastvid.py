# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FastVID (arXiv 2503.11187)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_peaks, naive_segments, naive_shares
from videos import best, cos, mean

DEFAULTS: dict[str, Any] = {"segments": 8, "threshold": 0.9, "context": 0.4, "step": 4, "centre": 0.6}


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any = None, **options: Any) -> dict[int, dict]:
    """Return the weights of the merged tokens of each kept token.

    Each segment keeps the salient tokens of each frame and merges the others into density peaks of the anchor frames.
    """
    settings = DEFAULTS | options
    frames, num_cells = video.shape[:2]
    x, a = video.tolist(), attention.tolist()
    means = [mean(frame) for frame in x]
    ends = naive_segments([cos(p, q) for p, q in pairwise(means)], settings["segments"], settings["threshold"])
    cuts = [-1, *[f for f, end in enumerate(ends) if end], frames - 1]
    budget = naive_shares([1.0] * frames, keep, [num_cells] * frames, 0)
    groups: dict[int, dict[int, float]] = {}
    for previous_end, last in pairwise(cuts):
        segment = list(range(previous_end + 1, last + 1))
        context = {f: int(budget[f] * settings["context"] + 1e-9) for f in segment}
        salient = {f: budget[f] - context[f] for f in segment}
        anchors = [f for f in segment if (last - f) % settings["step"] == 0]
        capacity = [num_cells - salient[f] for f in anchors]
        num_context = sum(context.values())
        centres = dict(zip(anchors, naive_shares([1.0] * len(anchors), num_context, capacity, 1), strict=True))
        other_frames = [f for f in segment if f not in anchors]
        extra = naive_shares(
            [1.0] * len(other_frames),
            num_context - sum(centres.values()),
            [num_cells - salient[f] for f in other_frames],
            1,
        )
        for f, n in zip(other_frames, extra, strict=True):
            salient[f] += n
        other_cells = {}
        for f in segment:
            salient_cells = best(range(num_cells), a[f], salient[f])
            groups |= {f * num_cells + p: {f * num_cells + p: 1.0} for p in salient_cells}
            other_cells[f] = [p for p in range(num_cells) if p not in salient_cells]
        picked = {
            f: [other_cells[f][i] for i in naive_peaks([x[f][p] for p in other_cells[f]], n, 4)]
            if other_cells[f] and n
            else []
            for f, n in centres.items()
        }
        members: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for f in segment:
            reachable = [g for g in anchors if picked[g]]
            if not reachable:
                continue
            g = min(reachable, key=lambda anchor: (abs(anchor - f), anchor))
            for p in other_cells[f]:
                is_center = p in picked.get(f, [])
                center = p if is_center else best(picked[g], {q: cos(x[f][p], x[g][q]) for q in picked[g]}, 1)[0]
                members.setdefault((f if is_center else g, center), []).append((f, p))
        for (g, q), cells in members.items():
            center_weight = max(settings["centre"], 1 / (len(cells) + 1))
            group = {f * num_cells + p: (1 - center_weight) / len(cells) for f, p in cells}
            group[g * num_cells + q] += center_weight
            groups[g * num_cells + q] = group
    return groups


ROWS = {
    "fastvid": Video(
        naive=naive,
        unchanged=("unit of attention", "unit of tokens"),
        tried=(
            {"segments": 1, "threshold": -1.0},  # one segment
            {"segments": 1, "step": 2},
            {"segments": 1, "step": 3, "context": 1.0},  # more centres than anchor frames have room for
            {"segments": 2, "context": 0.0},
            {"segments": 3, "centre": 0.1},
        ),
    )
}
