# SPDX-License-Identifier: Apache-2.0
"""prunevid against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

import math
from itertools import combinations, groupby, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from tests.kernels.test_temporal import naive_peaks, naive_shares
from tokenprune import Budget, OptionError
from tokenprune.methods.pre_llm.prunevid import scene_ends
from tokenprune.testing import visual_tokens
from videos import best, check_counts, clusters, compare, cos, given, mean, moving, same, select, shares_of


def contiguous(labels: list[int]) -> list[int]:
    """Labels of frames, each label's longest run grown over the others; by the frames themselves."""
    runs = []
    for _, run in groupby(range(len(labels)), key=lambda f: labels[f]):
        runs.append([*run])
    kept = [max((r for r in runs if labels[r[0]] == label), key=lambda r: (len(r), -r[0])) for label in set(labels)]
    while True:
        lost = [i for i, run in enumerate(runs) if not any(run[0] <= k[0] and k[-1] <= run[-1] for k in kept)]
        if not lost:
            return [i for i, run in enumerate(runs) for _ in run]
        i = lost[0]
        sides = [j for j in (i - 1, i + 1) if 0 <= j < len(runs)]
        to = max(sides, key=lambda j: (len(runs[j]), -j))
        runs[min(i, to) : max(i, to) + 1] = [sorted(runs[i] + runs[to])]


def naive(video: Tensor, attention: Tensor, keep: int, grid: Any = None, threshold: float = 0.8) -> dict[int, dict]:
    frames, places = video.shape[:2]
    x = video.tolist()
    means = [mean(frame) for frame in x]
    centres = naive_peaks(means, max(1, frames // 4), 7)
    labels = [min(centres, key=lambda c: (f != c, math.dist(means[f], means[c]), c)) for f in range(frames)]
    labels = [f if f in centres else label for f, label in enumerate(labels)]
    scenes = contiguous(labels)
    spans = {f: [g for g in range(frames) if scenes[g] == scenes[f]] for f in range(frames)}
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
    for (f, of, stands), n in zip(kinds, naive_shares([*map(float, sizes)], keep - len(alone), sizes, 1), strict=True):
        tokens = {p: copies[f, p] if stands else [f] for p in of}
        joined = clusters({p: mean([x[g][p] for g in tokens[p]]) for p in of}, n)
        for p, centre in joined.items():
            part = 1 / sum(one == centre for one in joined.values()) / len(tokens[p])
            groups.setdefault(f * places + centre, {}).update({g * places + p: part for g in tokens[p]})
    return groups


@pytest.mark.parametrize("cut", [None, 3])
@pytest.mark.parametrize("share", [0.04, 0.3, 0.6, 0.97])
def test_against_a_naive_loop(share: float, cut: int | None) -> None:
    compare("prunevid", naive, share, cut, newline=cut is None, inner=False)


@pytest.mark.parametrize("keep", [5, 40, 120])
@pytest.mark.parametrize("threshold", [0.2, 0.99])
def test_more_frames(keep: int, threshold: float) -> None:
    """Enough for several scenes."""
    video = moving(13, 3, 4, seed=2, cut=7)
    got = shares_of(select("prunevid", given([video], [keep], [(3, 4)]), inner=False, threshold=threshold), 0, 156)
    same(got, naive(video, torch.zeros(13, 12), keep, None, threshold))


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 16])
def test_counts(frames: int) -> None:
    check_counts("prunevid", frames, inner=False)


@pytest.mark.parametrize(
    ("labels", "lengths"),
    [
        ("aabb", [2, 2]), ("a", [1]), ("aaba", [2, 2]), ("aabaacc", [2, 1, 4]), ("abab", [1, 3]), ("abba", [1, 3]),
        ("ababb", [3, 2]), ("abcaab", [2, 1, 3]), ("aaabacbb", [5, 1, 2]),
    ],
)  # fmt: skip
def test_scenes_are_contiguous(labels: str, lengths: list[int]) -> None:
    """The longest run of a label stays, the others join the longer neighbour."""
    numbers = ["abc".index(one) for one in labels]
    made = contiguous(numbers)
    assert [len([*run]) for _, run in groupby(made)] == lengths
    assert scene_ends(numbers) == [a != b for a, b in pairwise(made)]


def test_a_static_video_is_its_frame() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    for keep in (4, 9, 16):
        groups = shares_of(select("prunevid", given([frame.repeat(5, 1, 1)], [keep], [(4, 4)]), inner=False), 0, 80)
        assert max(groups) < 16 and sorted(i for group in groups.values() for i in group) == list(range(80))
        for group in groups.values():
            assert all(len({f * 16 + i % 16 for f in range(5)} - group.keys()) == 0 for i in group)
            assert max(group.values()) == pytest.approx(min(group.values()))


def test_the_second_cut() -> None:
    """Each group keeps its share of what any head of any text token attends to most; without groups all are one."""
    g = torch.Generator().manual_seed(0)
    hidden, attention = torch.randn(1, 12, 6, generator=g), torch.rand(1, 2, 5, 12, generator=g)
    (_, _), (inner, _) = tokenprune.method("prunevid").stages(Budget(keep=0.3), 32)
    assert inner.layer == 10
    score = [max(attention[0, :, :, i].flatten().tolist()) for i in range(12)]
    group = [0, 0, 0, 1, 1, 1, 1, 1, 1, 3, 3, 3]
    carry = {"group": torch.tensor([group]), "groups": 4}
    about = {"keep": [5], "text_attention": attention, "text": {"hidden": torch.zeros(1, 5, 6)}}
    kept = inner.select(visual_tokens(hidden, carry=carry, **about)).keep[0].nonzero().flatten().tolist()
    numbers = naive_shares([3.0, 6.0, 3.0], 5, [3, 6, 3], 0)
    want = [
        best([i for i in range(12) if group[i] == n], score, number)
        for n, number in zip((0, 1, 3), numbers, strict=True)
    ]
    assert kept == sorted(i for of in want for i in of) and sum(numbers) == 5
    alone = inner.select(visual_tokens(hidden, **about)).keep[0].nonzero().flatten().tolist()
    assert alone == sorted(best(range(12), score, 5))


def test_the_first_cut_tells_the_second_of_groups() -> None:
    video = moving(5, 3, 3, seed=1)
    tokens = given([video, moving(1, 2, 2)], [20, 4], [(3, 3), (2, 2)])
    selection = tokenprune.method("prunevid", inner=False).select(tokens)
    group = tokens.carry["group"]
    assert tokens.carry["groups"] == 10 and group.shape == tokens.mask.shape
    still, moves = (group[0, :45] % 2 == 0), group[0, :45] % 2 == 1
    assert still.any() and moves.any()
    frames = torch.arange(45) // 9
    assert torch.equal(group[0, :45][moves], 2 * frames[moves] + 1) and (group[0, :45][still] == 0).all()
    assert selection.keep[1, :4].all()


def test_options() -> None:
    with pytest.raises(OptionError, match="layer=3 is of the second cut"):
        tokenprune.method("prunevid", inner=False, layer=3)
    (_, early), (_, late) = tokenprune.method("prunevid", inner_keep=0.2).stages(Budget(keep=0.3), 32)
    assert [relative for _, relative in early.cuts] == [1.0, 0.2] and late.cuts == early.cuts
