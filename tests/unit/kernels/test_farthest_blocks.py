# SPDX-License-Identifier: Apache-2.0
"""The farthest of many tokens, found block by block, against the loop that compares each pick with all."""

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


def one_after_the_other(unit: Tensor, number: int) -> Tensor:
    apart = cosine_distances(unit, unit).clone().fill_diagonal_(torch.inf)
    near, taken = apart.amin(1), []
    for step in range(number):
        free = [i for i in range(len(unit)) if i not in taken]
        taken.append(max(free, key=lambda i: (float(near[i]), -i)))
        near = apart[taken[-1]] if step == 0 else torch.minimum(near, apart[taken[-1]])
    return torch.zeros(len(unit), dtype=torch.bool).index_fill(0, torch.tensor(taken, dtype=torch.long), True)


def tokens(kind: str, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(COUNT, WIDTH, generator=g)
    if kind == "groups":
        return x[torch.randint(9, (COUNT,), generator=g)] + 0.1 * torch.randn(COUNT, WIDTH, generator=g)
    if kind == "copies":
        return x[torch.randint(COUNT // 3, (COUNT,), generator=g)]
    if kind == "corners":
        return x[:, :4].sign().repeat(1, 4)
    if kind == "levels":
        return x[:, :8].sign().repeat(1, 2)  # many distances, all of them shared by many
    if kind == "line":
        return 1 + 1e-3 * torch.arange(COUNT)[:, None] * x[0]
    if kind == "some zeros":
        return x * (torch.rand(COUNT, 1, generator=g) < 0.5)
    return {"random": x, "equal": x[:1].expand(COUNT, -1), "zeros": 0 * x}[kind]


KINDS = ("random", "groups", "copies", "corners", "levels", "line", "some zeros", "equal", "zeros")


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("kind", KINDS)
def test_same_picks_as_one_after_the_other(kind: str, dtype: torch.dtype) -> None:
    for seed, number in enumerate((1, 2, 17, 100, COUNT)):
        unit = normalize(tokens(kind, seed).to(dtype).float(), dim=-1)
        assert torch.equal(select_farthest_blocked(unit, number), one_after_the_other(unit, number)), number


@pytest.mark.parametrize("count", [2, 15, 16, 17, 33])
def test_few_tokens(count: int) -> None:
    unit = normalize(tokens("copies", 3)[:count], dim=-1)
    for number in range(count + 1):
        assert torch.equal(select_farthest_blocked(unit, number), one_after_the_other(unit, number))
    assert select_farthest_blocked(unit[:1], 1).tolist() == [True]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_tokens_that_are_not_finite(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a table and without: padding of any value, a bad token, a row of its own budget."""
    x, mask = torch.stack([tokens("random", seed) for seed in range(3)]), torch.ones(3, COUNT, dtype=torch.bool)
    mask[1, 40:], mask[2, :3] = False, False
    x[1, 41] = x[2, 9] = x[2, 50, 2] = bad
    for most in (1, 2, 40):
        budget = torch.tensor([most, most, most // 2])
        want = farthest.reference(x, mask, budget, most)
        with monkeypatch.context() as patch:
            patch.setattr(farthest_module, "fits_table", lambda features: False)
            assert torch.equal(farthest.reference(x, mask, budget, most), want)


@pytest.mark.parametrize("width", [20, 257, 1024])
def test_a_distance_is_the_same_number_everywhere(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is not in products of any shapes: so copies would win or lose by their place."""
    monkeypatch.undo()  # the real shape
    unit = normalize(torch.randn(700, width, generator=torch.Generator().manual_seed(width)), dim=-1)
    whole = cosine_distances(unit, unit)
    assert torch.equal(whole, whole.T)
    for rows, columns in ((1, 1), (3, 650), (520, 2), (600, 130)):
        a = torch.randperm(700, generator=torch.Generator().manual_seed(rows))[:rows]
        b = torch.randperm(700, generator=torch.Generator().manual_seed(columns))[:columns]
        assert torch.equal(cosine_distances(unit[a], unit[b]), whole[a][:, b])


def test_the_token_that_is_most_alone() -> None:
    for kind in KINDS:
        unit = normalize(tokens(kind, 7), dim=-1)
        near = cosine_distances(unit, unit).clone().fill_diagonal_(torch.inf).amin(1).tolist()
        assert find_most_isolated(unit) == near.index(max(near)), kind


def test_leaders() -> None:
    value = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0, -torch.inf])
    for number, places in {1: [1], 2: [1, 3], 4: [1, 2, 3, 4], 6: [0, 1, 2, 3, 4, 5]}.items():
        assert Leaders.from_values(value, number).indices.tolist() == places
    assert Leaders.from_values(value, 4)[1:] == (2.0, 4) and Leaders.from_values(value, 1)[1:] == (3.0, 1)


def test_fewer_comparisons_than_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Than all with all, and each pick with all; and nothing holds all distances at a time."""
    sizes = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        sizes.append(len(a) * len(b))
        return cosine_distances(a, b)

    monkeypatch.setattr(blocks, "cosine_distances", counted)
    g = torch.Generator().manual_seed(0)
    unit = normalize(torch.randn(40, 16, generator=g).repeat(50, 1) + 0.1 * torch.randn(2000, 16, generator=g), dim=-1)
    select_farthest_blocked(unit, 500)
    assert sum(sizes) < (2000 * 2000 + 2000 * 500) / 2
    assert max(sizes) < 2000**2 / 10
