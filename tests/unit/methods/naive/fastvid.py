# SPDX-License-Identifier: Apache-2.0
"""fastvid: a loop written from its description."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from method_rows import Video
from tests.unit.kernels.test_temporal import naive_peaks, naive_segments, naive_shares
from videos import best, cos, mean

DEFAULTS: dict[str, Any] = {"segments": 8, "threshold": 0.9, "context": 0.4, "step": 4, "centre": 0.6}


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any = None, **options: Any) -> dict[int, dict]:
    o = DEFAULTS | options
    frames, places = video.shape[:2]
    x, a = video.tolist(), attention.tolist()
    means = [mean(frame) for frame in x]
    ends = naive_segments([cos(p, q) for p, q in pairwise(means)], o["segments"], o["threshold"])
    cuts = [-1, *[f for f, end in enumerate(ends) if end], frames - 1]
    budget = naive_shares([1.0] * frames, keep, [places] * frames, 0)
    groups: dict[int, dict[int, float]] = {}
    for before, last in pairwise(cuts):
        segment = list(range(before + 1, last + 1))
        context = {f: int(budget[f] * o["context"] + 1e-9) for f in segment}
        salient = {f: budget[f] - context[f] for f in segment}
        anchors = [f for f in segment if (last - f) % o["step"] == 0]
        room = [places - salient[f] for f in anchors]
        wanted = sum(context.values())
        centres = dict(zip(anchors, naive_shares([1.0] * len(anchors), wanted, room, 1), strict=True))
        others = [f for f in segment if f not in anchors]
        more = naive_shares(
            [1.0] * len(others), wanted - sum(centres.values()), [places - salient[f] for f in others], 1
        )
        for f, n in zip(others, more, strict=True):
            salient[f] += n
        rest = {}
        for f in segment:
            top = best(range(places), a[f], salient[f])
            groups |= {f * places + p: {f * places + p: 1.0} for p in top}
            rest[f] = [p for p in range(places) if p not in top]
        picked = {
            f: [rest[f][i] for i in naive_peaks([x[f][p] for p in rest[f]], n, 4)] if rest[f] and n else []
            for f, n in centres.items()
        }
        members: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for f in segment:
            reachable = [g for g in anchors if picked[g]]
            if not reachable:
                continue
            g = min(reachable, key=lambda one: (abs(one - f), one))
            for p in rest[f]:
                own = p in picked.get(f, [])
                to = p if own else best(picked[g], {q: cos(x[f][p], x[g][q]) for q in picked[g]}, 1)[0]
                members.setdefault((f if own else g, to), []).append((f, p))
        for (g, q), joined in members.items():
            w = max(o["centre"], 1 / (len(joined) + 1))
            group = {f * places + p: (1 - w) / len(joined) for f, p in joined}
            group[g * places + q] += w
            groups[g * places + q] = group
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
