# SPDX-License-Identifier: Apache-2.0
"""prunevid against naive loops, on a static background with a moving object."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from tests.unit.kernels.test_temporal import naive_shares
from tests.unit.methods.naive.prunevid import contiguous, naive, spans_of
from tokenprune import Budget
from tokenprune.methods.video.prunevid import find_scene_ends
from tokenprune.testing import visual_tokens
from videos import best, given, moving, same, select, shares_of


@each("keep", [5, 40, 120])
@each("threshold", [0.2, 0.99])
def test_scenes_of_long_videos(keep: int, threshold: float) -> None:
    video = moving(13, 3, 4, seed=2, cut=7)
    got = shares_of(select("prunevid", given([video], [keep], [(3, 4)]), inner=False, threshold=threshold), 0, 156)
    same(got, naive(video, torch.zeros(13, 12), keep, None, threshold))


@each(
    ("labels", "lengths"),
    [
        ("aabb", [2, 2]), ("a", [1]), ("aabaa", [5]), ("abcd", [4]), ("aabbba", [2, 4]), ("aaba", [4]), ("abba", [4]),
        ("aabaacc", [5, 2]), ("aabcc", [3, 2]), ("aabcddd", [2, 5]), ("abbcaa", [4, 2]), ("aabbcaabb", [2, 3, 2, 2]),
    ],
)  # fmt: skip
def test_scenes_are_contiguous(labels: str, lengths: list[int]) -> None:
    """The longest runs of a label with at least two frames are scenes. Other runs join the longer neighbour."""
    indices = ["abcd".index(label) for label in labels]
    scenes = contiguous(indices)
    assert [len(span) for span in spans_of(scenes)] == lengths
    assert find_scene_ends(indices) == [a != b for a, b in pairwise(scenes)]


def test_scenes_match_loop_in_200_cases() -> None:
    draw = random.Random(0)
    for _ in range(200):
        labels = [draw.randrange(draw.randint(1, 4)) for _ in range(draw.randint(1, 20))]
        assert find_scene_ends(labels) == [a != b for a, b in pairwise(contiguous(labels))], labels


def test_matches_loop_in_200_cases() -> None:
    draw = random.Random(0)
    for case in range(200):
        frames, grid = draw.randint(1, 12), (draw.randint(1, 3), draw.randint(2, 6))
        num_tokens, threshold = grid[0] * grid[1], draw.choice([0.2, 0.8, 0.8, 0.99])
        keep = draw.randint(1, frames * num_tokens - 1)
        video = moving(frames, *grid, seed=case, noise=draw.choice([0.02, 0.3]), cut=draw.choice([None, 2, 5]))
        if draw.random() < 0.3:
            video[-1, 0] = video[-1, 1]  # two equal tokens
        tokens = given([video], [keep], [grid])
        got = shares_of(select("prunevid", tokens, threshold=threshold, inner=False), 0, frames * num_tokens)
        same(got, naive(video, torch.zeros(0), keep, grid, threshold))

        (_, _), (inner, _) = tokenprune.method("prunevid").stages(Budget(keep=0.3), 32)
        kept = sorted(got)
        group = tokens.carry["group"][0, kept].tolist()
        num_kept = draw.randint(1, len(kept))
        g = torch.Generator().manual_seed(case)
        attention = (torch.rand(1, 2, 3, len(kept), generator=g) * 20).round() / 20
        inputs = {"text_attention": attention, "text": {"hidden": torch.zeros(1, 3, 4)}, "keep": [num_kept]}
        carry = {"group": torch.tensor([group]), "groups": 2 * frames}
        late = inner.select(visual_tokens(torch.zeros(1, len(kept), 4), carry=carry, **inputs)).keep[0]
        assert late.nonzero().flatten().tolist() == naive_inner(attention[0], group, num_kept)


def naive_inner(attention: Tensor, group: list[int], keep: int) -> list[int]:
    """Return the tokens kept in step 5: each part gets a share, ranked by the largest attention of heads and words."""
    score = [max(attention[:, :, i].flatten().tolist()) for i in range(len(group))]
    sizes = [group.count(label) for label in range(max(group) + 1)]
    quotas = naive_shares([*map(float, sizes)], keep, sizes, 0)
    parts = [[i for i in range(len(group)) if group[i] == label] for label in range(len(sizes))]
    return sorted(i for part, quota in zip(parts, quotas, strict=True) for i in best(part, score, quota))


def test_counts_match_authors_rule() -> None:
    """The authors keep half of each part with more than 14 tokens, and all tokens of the other parts."""
    video = moving(8, 4, 8, seed=1, cut=4)
    tokens = given([video], [20], [(4, 8)])
    select("prunevid", tokens, inner=False)
    group = tokens.carry["group"][0].tolist()
    members = {label: [i for i in range(8 * 32) if group[i] == label] for label in set(group)}
    parts = {label: {i % 32 if label % 2 == 0 else i for i in indices} for label, indices in members.items()}
    rule = {label: len(part) if len(part) <= 14 else len(part) // 2 for label, part in parts.items()}
    assert any(len(part) > 14 for part in parts.values()) and any(len(part) <= 14 for part in parts.values())
    got = select("prunevid", given([video], [sum(rule.values())], [(4, 8)]), inner=False).keep[0]
    assert {label: sum(group[i] == label for i in got.nonzero().flatten().tolist()) for label in parts} == rule


def test_static_video_becomes_one_frame() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    for keep in (4, 9, 16):
        groups = shares_of(select("prunevid", given([frame.repeat(5, 1, 1)], [keep], [(4, 4)]), inner=False), 0, 80)
        assert max(groups) < 16 and sorted(i for group in groups.values() for i in group) == list(range(80))
        for group in groups.values():
            assert all(len({f * 16 + i % 16 for f in range(5)} - group.keys()) == 0 for i in group)
            assert max(group.values()) == pytest.approx(min(group.values()))


def test_second_cut_without_groups_keeps_the_highest_attention() -> None:
    g = torch.Generator().manual_seed(0)
    attention = torch.rand(1, 2, 5, 12, generator=g)
    (_, _), (inner, _) = tokenprune.method("prunevid").stages(Budget(keep=0.3), 32)
    assert inner.layer == 11  # ranked by the attention of layer 10
    tokens = visual_tokens(
        torch.zeros(1, 12, 6), keep=[5], text_attention=attention, text={"hidden": torch.zeros(1, 5, 6)}
    )
    want = sorted(best(range(12), attention[0].amax((0, 1)).tolist(), 5))
    assert inner.select(tokens).keep[0].nonzero().flatten().tolist() == want


def test_first_cut_stores_groups() -> None:
    video = moving(5, 3, 3, seed=1)
    tokens = given([video, moving(1, 2, 2)], [20, 4], [(3, 3), (2, 2)])
    selection = tokenprune.method("prunevid", inner=False).select(tokens)
    group = tokens.carry["group"]
    assert tokens.carry["groups"] == 10 and group.shape == tokens.mask.shape
    is_static, is_moving = (group[0, :45] % 2 == 0), group[0, :45] % 2 == 1
    assert is_static.any() and is_moving.any()
    frames = torch.arange(45) // 9
    assert torch.equal(group[0, :45][is_moving], 2 * frames[is_moving] + 1) and (group[0, :45][is_static] == 0).all()
    assert selection.keep[1, :4].all()
