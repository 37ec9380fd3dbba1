# SPDX-License-Identifier: Apache-2.0
"""flashvid against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from tests.kernels.test_temporal import naive_segments, naive_shares
from tests.methods.test_methods import naive_divprune
from tokenprune import Budget, OptionError
from videos import attention_of, best, check_counts, clusters, compare, cos, given, mean, moving, same, select
from videos import shares_of as groups_of


def picks(frame: list[list[float]], attention: list[float], number: int) -> list[int]:
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
    video: Tensor, attention: Tensor, keep: int, grid: Any = None, share: float = 0.7, threshold: float = 0.8
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
    number = [math.ceil(b * share - 1e-9) for b in budget]
    picked = [picks(x[f], a[f], number[f]) for f in range(frames)]
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


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("share", [0.04, 0.3, 0.6, 0.97])
def test_against_a_naive_loop(share: float, cut: int | None) -> None:
    compare("flashvid", naive, share, cut, newline=cut is None, inner=False)


@pytest.mark.parametrize("options", [{"threshold": 1.0}, {"threshold": -1.0}, {"picks": 0.2}, {"picks": 1.0}])
def test_options(options: dict) -> None:
    """With a threshold of 1 no tree has a second token: picks and clusters within frames alone."""
    video = moving(5, 4, 4, seed=1)
    got = groups_of(select("flashvid", given([video], [31], [(4, 4)]), inner=False, **options), 0, 80)
    same(got, naive(video, attention_of(video), 31, None, options.get("picks", 0.7), options.get("threshold", 0.8)))
    if options.get("threshold") == 1.0:
        assert all(len({i // 16 for i in group}) == 1 for group in got.values())


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 16])
def test_counts(frames: int) -> None:
    check_counts("flashvid", frames, inner=False)


def test_with_equal_attention_it_picks_as_divprune_does() -> None:
    video = moving(4, 4, 4, seed=2)
    tokens = given([video], [20], [(4, 4)], attention=[torch.full((4, 16), 0.25)])
    selection = select("flashvid", tokens, inner=False, picks=1.0)
    for frame in range(4):
        want = sorted(naive_divprune(video[frame], 5))
        assert selection.keep[0, 16 * frame : 16 * frame + 16].nonzero().flatten().tolist() == want


def test_trees_join_only_the_frame_before() -> None:
    """A tree has a token in each frame of a stretch that begins at its root, and none in another segment."""
    video = moving(8, 4, 4, seed=3, cut=5)
    groups = groups_of(select("flashvid", given([video], [40], [(4, 4)]), inner=False), 0, 128)
    assert any(len(group) > 3 for group in groups.values())
    for target, group in groups.items():
        seen = sorted({i // 16 for i in group})
        assert seen == list(range(target // 16, target // 16 + len(seen)))
        assert not {4, 5} <= set(seen)


def test_a_static_video() -> None:
    """What is not picked stands still: the copies of a place are one tree, and each token's mass is in one mean."""
    frame = moving(1, 4, 4, noise=0.0)
    attention = attention_of(frame).repeat(4, 1)
    tokens = given([frame.repeat(4, 1, 1)], [24], [(4, 4)], attention=[attention])
    groups = groups_of(select("flashvid", tokens, inner=False), 0, 64)
    assert sorted(i for group in groups.values() for i in group) == list(range(64))
    for group in groups.values():
        for i, part in group.items():
            if len(group) > 1:
                assert all(group[f * 16 + i % 16] == pytest.approx(part) for f in range(4))


def test_its_cuts_keep_what_is_asked_for_on_average() -> None:
    """The paper's shares: a quarter more than asked for up to layer 20 of 28, then 0.3 of it."""
    (first, early), (second, late) = tokenprune.method("flashvid").stages(Budget(keep=0.1), 28)
    assert first == tokenprune.method("flashvid", inner=False) and second.layer == 20
    (kept,) = early.resolve([10_000], layer=0, shape=_shape(28), text_tokens=0)
    (left,) = late.resolve([kept], layer=20, shape=_shape(28), text_tokens=0, original=[10_000])
    assert kept == pytest.approx(1250, abs=2) and left == pytest.approx(375, abs=1)
    with pytest.raises(OptionError, match="layer=5 is of the second cut"):
        tokenprune.method("flashvid", inner=False, layer=5)


def _shape(layers: int) -> Any:
    from tokenprune.shapes.decoder import DecoderShape

    return DecoderShape(layers, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16)
