# SPDX-License-Identifier: Apache-2.0
"""kitoke against naive loops written from its description, on a still background with a moving part."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from each import each
from tests.unit.methods.naive.kitoke import crowding, intervals, naive
from tokenprune.methods.video.kitoke import (
    compute_density,
    compute_probabilities,
    median_squared_distance,
    sample_pivotal,
)
from videos import given, moving, select, shares_of


@each(("change", "jump"), [(9.0, 0.02), (9.0, 0.3), (0.5, 9.0)])
@each("cut", [1, 4, 6])
def test_intervals(change: float, jump: float, cut: int) -> None:
    """Where frames are far apart, or farther than two neighbouring ones."""
    video = moving(7, 3, 4, seed=1, cut=cut, noise=0.1)
    _, unit = crowding(video.flatten(0, 1).tolist())
    method = tokenprune.method("kitoke", change=change, jump=jump)
    got = method._find_intervals(video, torch.ones(7, 12, dtype=torch.bool), torch.tensor(unit))
    assert got.tolist() == intervals(video.tolist(), unit, change, jump)
    assert got[-1] >= 1


@pytest.mark.parametrize("cut", [None, 2])
def test_what_is_drawn_takes_the_rest(cut: int | None) -> None:
    video = moving(5, 4, 4, seed=2, cut=cut)
    selection = select("kitoke", given([video], [9], [(4, 4)]), seed=4)
    kept = selection.keep[0].nonzero().flatten().tolist()
    got, want = shares_of(selection, 0, 80), naive(video, torch.zeros(5, 16), 9, (4, 4), kept)
    assert {to: set(group) for to, group in got.items()} == {to: set(group) for to, group in want.items()}
    for to, group in want.items():
        assert got[to] == pytest.approx(group, rel=1e-3)


def test_a_draw_is_the_seeds() -> None:
    video, other = moving(4, 4, 4, seed=3), moving(6, 3, 3, seed=5)
    one = select("kitoke", given([video], [12], [(4, 4)]), seed=1).keep
    assert torch.equal(one, select("kitoke", given([video], [12], [(4, 4)]), seed=1).keep)
    assert not torch.equal(one, select("kitoke", given([video], [12], [(4, 4)]), seed=2).keep)
    both = select("kitoke", given([video, other], [12, 5], [(4, 4), (3, 3)]), seed=1)
    assert torch.equal(both.keep[0, :64], one[0])


@pytest.mark.parametrize("number", [1, 5, 12, 19])
def test_chances_sum_to_what_is_drawn(number: int) -> None:
    weight = torch.rand(20, generator=torch.Generator().manual_seed(number)).double() ** 4 + 1e-3
    chance = compute_probabilities(weight, number)
    assert chance.sum().item() == pytest.approx(number) and chance.max() <= 1
    free = chance < 1
    ratio = chance[free] / weight[free]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # in proportion, but for the certain ones
    assert not free.all() or chance.argmax() == weight.argmax()


def test_each_is_drawn_as_often_as_its_chance_says() -> None:
    chance = [1.0, 0.5, 0.05, 0.9, 0.3, 0.25]
    often = [0] * 6
    for seed in range(2000):
        drawn = sample_pivotal(chance, 3, torch.Generator().manual_seed(seed))
        assert len(drawn) == len(set(drawn)) == 3
        for i in drawn:
            often[i] += 1
    assert often[0] == 2000
    assert [n / 2000 for n in often] == pytest.approx(chance, abs=0.04)


def test_copies_share_one_chance() -> None:
    """A token and its four copies are drawn as often together as one token that stands alone."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 30, generator=g) * 10
    many = torch.cat([x, x[:1].repeat(4, 1)])
    many = many - many.mean(0)
    rarity = 1 / compute_density(many, 0.01 * median_squared_distance(many))
    torch.testing.assert_close(rarity[0], torch.tensor(0.2, dtype=torch.float64), atol=1e-3, rtol=0)
    torch.testing.assert_close(rarity[6:].sum() + rarity[0], rarity[1], atol=1e-3, rtol=0)
    turn = torch.randperm(10, generator=g)
    # Distances are float32, and a processor may round them otherwise in another order.
    torch.testing.assert_close(
        1 / compute_density(many[turn], 0.01 * median_squared_distance(many)), rarity[turn], atol=0, rtol=1e-5
    )


def test_a_static_video_has_no_cut() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    selection = select("kitoke", given([frame.repeat(6, 1, 1)], [10], [(4, 4)]), sample=False)
    groups = shares_of(selection, 0, 96)
    assert sorted(i for group in groups.values() for i in group) == list(range(96))
    zeros = select("kitoke", given([torch.zeros(4, 9, 12)], [5], [(3, 3)]))
    assert zeros.keep.sum() == 5
