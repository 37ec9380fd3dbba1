# SPDX-License-Identifier: Apache-2.0
"""Farthest-point selection in blocks equals the loop that compares each pick with all tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from each import each
from tokenprune.kernels import farthest as farthest_module
from tokenprune.kernels import farthest_blocks as blocks
from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.farthest_blocks import Leaders, cosine_distances, find_most_isolated, select_farthest_blocked

COUNT, WIDTH = 150, 24


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROWS", 32)
    monkeypatch.setattr(blocks, "COLUMNS", 16)
    monkeypatch.setattr(blocks, "_STEPS", 5)


def select_by_loop(unit: Tensor, num_picks: int) -> Tensor:
    distance = cosine_distances(unit, unit).clone().fill_diagonal_(torch.inf)
    nearest, picks = distance.amin(1), []
    for step in range(num_picks):
        candidates = [i for i in range(len(unit)) if i not in picks]
        picks.append(max(candidates, key=lambda i: (float(nearest[i]), -i)))
        nearest = distance[picks[-1]] if step == 0 else torch.minimum(nearest, distance[picks[-1]])
    return torch.zeros(len(unit), dtype=torch.bool).index_fill(0, torch.tensor(picks, dtype=torch.long), True)


def make_tokens(kind: str, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(COUNT, WIDTH, generator=g)
    if kind == "groups":
        return x[torch.randint(9, (COUNT,), generator=g)] + 0.1 * torch.randn(COUNT, WIDTH, generator=g)
    if kind == "copies":
        return x[torch.randint(COUNT // 3, (COUNT,), generator=g)]
    if kind == "corners":
        return x[:, :4].sign().repeat(1, 4)
    if kind == "levels":
        return x[:, :8].sign().repeat(1, 2)  # few distinct distances, each shared by many pairs
    if kind == "line":
        return 1 + 1e-3 * torch.arange(COUNT)[:, None] * x[0]
    if kind == "some zeros":
        return x * (torch.rand(COUNT, 1, generator=g) < 0.5)
    return {"random": x, "equal": x[:1].expand(COUNT, -1), "zeros": 0 * x}[kind]


KINDS = ("random", "groups", "copies", "corners", "levels", "line", "some zeros", "equal", "zeros")


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("kind", KINDS)
def test_same_picks_as_one_after_the_other(kind: str, dtype: torch.dtype) -> None:
    for seed, num_picks in enumerate((1, 2, 17, 100, COUNT)):
        unit = normalize(make_tokens(kind, seed).to(dtype).float(), dim=-1)
        assert torch.equal(select_farthest_blocked(unit, num_picks), select_by_loop(unit, num_picks)), num_picks


@pytest.mark.parametrize("count", [2, 15, 16, 17, 33])
def test_few_tokens(count: int) -> None:
    unit = normalize(make_tokens("copies", 3)[:count], dim=-1)
    for num_picks in range(count + 1):
        assert torch.equal(select_farthest_blocked(unit, num_picks), select_by_loop(unit, num_picks))
    assert select_farthest_blocked(unit[:1], 1).tolist() == [True]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_tokens_that_are_not_finite(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocked selection equals the table, with padding, a non-finite token and budgets per row."""
    x, mask = torch.stack([make_tokens("random", seed) for seed in range(3)]), torch.ones(3, COUNT, dtype=torch.bool)
    mask[1, 40:], mask[2, :3] = False, False
    x[1, 41] = x[2, 9] = x[2, 50, 2] = bad
    for max_picks in (1, 2, 40):
        budget = torch.tensor([max_picks, max_picks, max_picks // 2])
        want = farthest.reference(x, mask, budget, max_picks)
        with monkeypatch.context() as patch:
            patch.setattr(farthest_module, "fits_table", lambda features: False)
            assert torch.equal(farthest.reference(x, mask, budget, max_picks), want)


@pytest.mark.parametrize("width", [20, 257, 1024])
def test_distance_is_independent_of_position(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain matrix product depends on its shape, so the index of a copy would decide ties."""
    monkeypatch.undo()  # restore the default block sizes
    unit = normalize(torch.randn(700, width, generator=torch.Generator().manual_seed(width)), dim=-1)
    distance = cosine_distances(unit, unit)
    assert torch.equal(distance, distance.T)
    for rows, columns in ((1, 1), (3, 650), (520, 2), (600, 130)):
        a = torch.randperm(700, generator=torch.Generator().manual_seed(rows))[:rows]
        b = torch.randperm(700, generator=torch.Generator().manual_seed(columns))[:columns]
        assert torch.equal(cosine_distances(unit[a], unit[b]), distance[a][:, b])


def test_find_most_isolated() -> None:
    for kind in KINDS:
        unit = normalize(make_tokens(kind, 7), dim=-1)
        nearest = cosine_distances(unit, unit).clone().fill_diagonal_(torch.inf).amin(1).tolist()
        assert find_most_isolated(unit) == nearest.index(max(nearest)), kind


def test_leaders() -> None:
    value = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -torch.inf])
    for num_leaders, expected in {1: [1], 2: [1, 3], 4: [1, 2, 3, 4], 6: [0, 1, 2, 3, 4, 5]}.items():
        assert Leaders.from_values(value, num_leaders).indices.tolist() == expected
    assert Leaders.from_values(value, 4)[1:] == (2.0, 4) and Leaders.from_values(value, 1)[1:] == (3.0, 1)


def test_fewer_comparisons_than_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks need less than half the comparisons of the loop and hold no full distance table."""
    sizes = []

    def count_comparisons(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(len(a) * len(b))
        return cosine_distances(a, b)

    monkeypatch.setattr(blocks, "cosine_distances", count_comparisons)
    g = torch.Generator().manual_seed(0)
    unit = normalize(torch.randn(40, 16, generator=g).repeat(50, 1) + 0.1 * torch.randn(2000, 16, generator=g), dim=-1)
    select_farthest_blocked(unit, 500)
    assert sum(sizes) < (2000 * 2000 + 2000 * 500) / 2
    assert max(sizes) < 2000**2 / 10
