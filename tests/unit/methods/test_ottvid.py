# SPDX-License-Identifier: Apache-2.0
"""ottvid against naive loops, on a static background with a moving object."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from each import each
from tests.unit.methods.naive.ottvid import naive, sinkhorn
from tokenprune.kernels.masses import optimal_transport
from tokenprune.methods.video.ottvid import count_picks
from videos import attention_of, given, moving, same, select, shares_of


def test_matches_loop_in_200_cases() -> None:
    draw = random.Random(0)
    for case in range(200):
        frames, grid = draw.randint(2, 4), (draw.randint(1, 2), draw.randint(2, 4))
        count = frames * grid[0] * grid[1]
        keep, threshold = draw.randint(1, count - 1), draw.choice([0.05, 0.3, 0.3, math.inf])
        video = moving(frames, *grid, seed=case, noise=draw.choice([0.02, 0.3, 1.0]))
        if draw.random() < 0.3:
            video[-1, 0] = video[-1, 1]  # two equal tokens
        attention = attention_of(video, case)
        tokens = given([video], [keep], [grid], attention=[attention])
        got = shares_of(select("ottvid", tokens, threshold=threshold), 0, count)
        same(got, naive(video, attention, keep, grid, threshold))


@each("case", [(0, 12, 30), (6, 8, 12), (7, 12, 20), (11, 12, 30), (13, 8, 12)])
def test_surplus_is_shared_among_pairs(case: tuple[int, int, int]) -> None:
    """Some pairs of frames cannot drop their share, so a second round distributes the surplus."""
    seed, frames, keep = case
    video = moving(frames, 4, 6, seed=seed, cut=4, noise=0.1)
    attention = attention_of(video, seed)
    tokens = given([video], [keep], [(4, 6)], attention=[attention])
    same(shares_of(select("ottvid", tokens), 0, frames * 24), naive(video, attention, keep, (4, 6)))


def test_count_picks_is_feasible() -> None:
    """The paper's number is used if it can reach the budget, else the closest feasible number."""
    assert count_picks(58, [36] * 16) == int(36 * (58 / 576) ** 0.7) and count_picks(7, [36]) == 7
    for frames in (2, 5, 16):
        for num_tokens in (1, 9, 36):
            for keep in range(1, frames * num_tokens):
                k = count_picks(keep, [num_tokens] * frames)
                assert 1 <= k <= num_tokens and k * frames >= keep
                assert frames * k - keep <= (frames - 1) * (k - 1 if keep >= frames else k)


def test_transport_preserves_masses() -> None:
    g = torch.Generator().manual_seed(0)
    cost = torch.rand(2, 4, 5, generator=g)
    rows, columns = torch.randn(2, 4, generator=g).log_softmax(1), torch.randn(2, 5, generator=g).log_softmax(1)
    rows[1, 3] = columns[1, 0] = -torch.inf  # padding
    rows, columns = rows.log_softmax(1), columns.log_softmax(1)
    plan = optimal_transport(cost, rows, columns)
    torch.testing.assert_close(plan.sum(2), rows.exp())
    torch.testing.assert_close(plan.sum(1), columns.exp(), atol=0.02, rtol=0)
    assert not plan[1, 3].any() and not plan[1, :, 0].any()
    want = sinkhorn(cost[0].double().numpy(), rows[0].exp().double().numpy(), columns[0].exp().double().numpy())
    np.testing.assert_allclose(plan[0].numpy(), want, atol=1e-4)


def test_static_video_merges_same_patches() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    attention = [attention_of(frame).repeat(5, 1)]
    groups = shares_of(select("ottvid", given([frame.repeat(5, 1, 1)], [20], [(4, 4)], attention=attention)), 0, 80)
    assert all(len({i % 16 for i in group}) == 1 for group in groups.values())
    k = count_picks(20, [16] * 5)
    counts = [sum(root // 16 == f for root in groups) for f in range(5)]
    assert counts[0] == k and max(counts[1:]) - min(counts[1:]) <= 1


def test_zero_attention_weights_tokens_equally() -> None:
    video: Any = moving(2, 3, 3)
    zero, equal = (
        select("ottvid", given([video], [6], [(3, 3)], attention=[torch.full((2, 9), value)])) for value in (0.0, 1 / 9)
    )
    assert torch.equal(zero.assign, equal.assign)
    assert len([*pairwise(zero.keep[0].nonzero())]) == 5
