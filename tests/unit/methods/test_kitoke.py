# SPDX-License-Identifier: Apache-2.0
"""kitoke against naive loops, on a static background with a moving object."""

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
def test_intervals_match_loop(change: float, jump: float, cut: int) -> None:
    """Intervals end between frames that differ much, or more than neighbouring frames do."""
    video = moving(7, 3, 4, seed=1, cut=cut, noise=0.1)
    _, unit = crowding(video.flatten(0, 1).tolist())
    method = tokenprune.method("kitoke", change=change, jump=jump)
    got = method._find_intervals(video, torch.ones(7, 12, dtype=torch.bool), torch.tensor(unit))
    assert got.tolist() == intervals(video.tolist(), unit, change, jump)
    assert got[-1] >= 1


@pytest.mark.parametrize("cut", [None, 2])
def test_sampled_tokens_absorb_others(cut: int | None) -> None:
    video = moving(5, 4, 4, seed=2, cut=cut)
    selection = select("kitoke", given([video], [9], [(4, 4)]), seed=4)
    kept = selection.keep[0].nonzero().flatten().tolist()
    got, want = shares_of(selection, 0, 80), naive(video, torch.zeros(5, 16), 9, (4, 4), kept)
    assert {target: set(group) for target, group in got.items()} == {
        target: set(group) for target, group in want.items()
    }
    for target, group in want.items():
        assert got[target] == pytest.approx(group, rel=1e-3)


def test_seed_determines_samples() -> None:
    video, other = moving(4, 4, 4, seed=3), moving(6, 3, 3, seed=5)
    single = select("kitoke", given([video], [12], [(4, 4)]), seed=1).keep
    assert torch.equal(single, select("kitoke", given([video], [12], [(4, 4)]), seed=1).keep)
    assert not torch.equal(single, select("kitoke", given([video], [12], [(4, 4)]), seed=2).keep)
    both = select("kitoke", given([video, other], [12, 5], [(4, 4), (3, 3)]), seed=1)
    assert torch.equal(both.keep[0, :64], single[0])


@pytest.mark.parametrize("count", [1, 5, 12, 19])
def test_probabilities_sum_to_sample_count(count: int) -> None:
    weight = torch.rand(20, generator=torch.Generator().manual_seed(count)).double() ** 4 + 1e-3
    chance = compute_probabilities(weight, count)
    assert chance.sum().item() == pytest.approx(count) and chance.max() <= 1
    uncertain = chance < 1
    ratio = chance[uncertain] / weight[uncertain]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))  # proportional, except for certain tokens
    assert not uncertain.all() or chance.argmax() == weight.argmax()


def test_sampling_frequencies_match_probabilities() -> None:
    chance = [1.0, 0.5, 0.05, 0.9, 0.3, 0.25]
    counts = [0] * 6
    for seed in range(2000):
        sample = sample_pivotal(chance, 3, torch.Generator().manual_seed(seed))
        assert len(sample) == len(set(sample)) == 3
        for i in sample:
            counts[i] += 1
    assert counts[0] == 2000
    assert [n / 2000 for n in counts] == pytest.approx(chance, abs=0.04)


def test_copies_share_one_probability() -> None:
    """A token and its four copies together are sampled as often as one distinct token."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 30, generator=g) * 10
    tokens = torch.cat([x, x[:1].repeat(4, 1)])
    tokens = tokens - tokens.mean(0)
    rarity = 1 / compute_density(tokens, 0.01 * median_squared_distance(tokens))
    torch.testing.assert_close(rarity[0], torch.tensor(0.2, dtype=torch.float64), atol=1e-3, rtol=0)
    torch.testing.assert_close(rarity[6:].sum() + rarity[0], rarity[1], atol=1e-3, rtol=0)
    order = torch.randperm(10, generator=g)
    # Distances are float32, and their rounding may depend on the order of the tokens.
    torch.testing.assert_close(
        1 / compute_density(tokens[order], 0.01 * median_squared_distance(tokens)), rarity[order], atol=0, rtol=1e-5
    )


def test_static_video_has_one_interval() -> None:
    frame = moving(1, 4, 4, noise=0.0)
    selection = select("kitoke", given([frame.repeat(6, 1, 1)], [10], [(4, 4)]), sample=False)
    groups = shares_of(selection, 0, 96)
    assert sorted(i for group in groups.values() for i in group) == list(range(96))
    zeros = select("kitoke", given([torch.zeros(4, 9, 12)], [5], [(3, 3)]))
    assert zeros.keep.sum() == 5
