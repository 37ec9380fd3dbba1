# SPDX-License-Identifier: Apache-2.0
"""fastvid against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_temporal import naive_peaks, naive_segments, naive_shares
from videos import attention_of, best, check_counts, compare, cos, given, mean, moving, same, select, shares_of

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


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("share", [0.04, 0.3, 0.6, 0.97])
def test_against_a_naive_loop(share: float, cut: int | None) -> None:
    compare("fastvid", naive, share, cut, newline=cut is None)


@pytest.mark.parametrize(
    "options",
    [
        {"segments": 1, "threshold": -1.0},  # one segment
        {"segments": 1, "step": 2},
        {"segments": 1, "step": 3, "context": 1.0},  # more centres than anchor frames have room for
        {"segments": 2, "context": 0.0},
        {"segments": 3, "centre": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("keep", [7, 24, 70])
def test_options(options: dict, keep: int) -> None:
    video = moving(7, 4, 4, seed=1, cut=4)
    got = shares_of(select("fastvid", given([video], [keep], [(4, 4)]), **options), 0, 112)
    same(got, naive(video, attention_of(video), keep, **options))


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 16])
def test_counts(frames: int) -> None:
    check_counts("fastvid", frames)


def test_a_static_video_has_centres_in_anchor_frames_only() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    video, attention = frame.repeat(9, 1, 1), attention_of(frame).repeat(9, 1)
    tokens = given([video], [36], [(4, 4)], attention=[attention])
    groups = shares_of(select("fastvid", tokens, segments=1), 0, 144)
    top = set(best(range(16), attention[0].tolist(), 3))
    centres = [i for i in groups if i % 16 not in top]
    assert {i // 16 for i in centres} == {0, 4, 8} and len(groups) == 36
    assert sorted(i for group in groups.values() for i in group) == list(range(144))  # every token once


def test_attention_by_another_factor_changes_nothing() -> None:
    video = moving(5, 3, 3, seed=2)
    one, other = (
        select("fastvid", given([video], [17], [(3, 3)], attention=[attention_of(video) * by])) for by in (1.0, 64.0)
    )
    assert torch.equal(one.assign, other.assign) and torch.equal(one.weight, other.weight)


def test_a_centre_weighs_most() -> None:
    """However many tokens join it."""
    groups = shares_of(select("fastvid", given([moving(6, 4, 4)], [30], [(4, 4)]), segments=1), 0, 96)
    many = [group[target] for target, group in groups.items() if len(group) > 3]
    assert many and all(part > 0.6 or math.isclose(part, 0.6, abs_tol=1e-6) for part in many)
