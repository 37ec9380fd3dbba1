# SPDX-License-Identifier: Apache-2.0
"""Greedy coverage, greedy determinants and suppression against plain loops; batches give what their rows give alone."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from greedy import next_pick
from tokenprune.kernels.coverage import cosines, coverage_gain, most_covering
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.suppress import unsuppressed

COUNTS, WANTED = [12, 7, 1], [5, 6, 1]


def rows(width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of three rows with padding that is not zero, its mask, and how many to take."""
    mask = torch.arange(12) < torch.tensor(COUNTS)[:, None]
    x = torch.randn(3, 12, width, generator=torch.Generator().manual_seed(seed))
    return x.masked_fill(~mask.unsqueeze(2), 7.0), mask, torch.tensor(WANTED)


def taken(keep: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


def test_cosines() -> None:
    x, mask, _ = rows()
    x[0, 3] = math.nan
    x[0, 4] = 0
    x[0, 6] = 3 * x[0, 5]
    got = cosines(x, mask=mask)
    for row in range(3):
        for i in range(12):
            for j in range(12):
                a, b = x[row, i].double(), x[row, j].double()
                real = i < COUNTS[row] and j < COUNTS[row] and not {i, j} & ({3, 4} if row == 0 else set())
                want = float(a @ b / (a.norm() * b.norm())) if real else 0.0
                assert float(got[row, i, j]) == pytest.approx(want, abs=1e-6)
    assert torch.equal(got, got.transpose(1, 2))
    assert got[0, 5, 6] == got[0, 5, 5] == 1 and torch.equal(got[0, 5], got[0, 6])
    assert torch.equal(got, (got * 2**20).round() / 2**20)
    other = cosines(x, x[:, :2], mask)
    assert torch.allclose(other[:2], got[:2, :, :2], atol=1e-6)


@pytest.mark.parametrize("weighed", [False, True])
def test_most_covering(weighed: bool) -> None:
    _, mask, number = rows()
    g = torch.Generator().manual_seed(1)
    table = torch.rand(3, 12, 9, generator=g) * (torch.arange(9) < torch.tensor([9, 4, 2])[:, None])[:, None]
    factor = torch.rand(3, 12, generator=g) if weighed else None
    got = taken(most_covering(table, mask, number, 6, factor))
    for row, count in enumerate(COUNTS):
        picks: list[int] = []
        for _ in range(WANTED[row]):
            best = [max((float(table[row, i, r]) for i in picks), default=0.0) for r in range(9)]
            gain = [sum(max(0.0, float(table[row, i, r]) - best[r]) for r in range(9)) for i in range(count)]
            gain = torch.tensor(gain, dtype=torch.float64) * (factor[row, :count] if weighed else 1)
            picks.append(next_pick(gain, picks, got[row], 1e-6))
        assert sorted(picks) == got[row]


@pytest.mark.parametrize(("s", "n", "r"), [(1, 1, 1), (2, 13, 37), (3, 9, 16), (1, 0, 4)])
def test_the_kernel_gives_what_the_reference_does(kernel_device: torch.device, s: int, n: int, r: int) -> None:
    g = torch.Generator().manual_seed(s)
    table, cover = torch.randn(s, n, 2 * r, generator=g)[..., ::2], torch.rand(s, r, generator=g)
    cover[:, 0] = math.inf
    for blocks in ((8, 256), (4, 16)):
        got = coverage_gain.triton(table.to(kernel_device), cover.to(kernel_device), blocks=blocks)
        torch.testing.assert_close(got.cpu(), coverage_gain.reference(table, cover), atol=1e-5, rtol=1e-5)
    assert "float32" in coverage_gain.obstacle(table.half().to(kernel_device), cover.to(kernel_device))


def test_a_row_that_is_left_out_counts_nothing() -> None:
    table = torch.tensor([[[1.0, -0.5], [0.2, 3.0]]])
    assert coverage_gain(table, torch.tensor([[0.0, 0.0]])).tolist() == [[1.0, pytest.approx(3.2)]]
    assert coverage_gain(table, torch.tensor([[-1.0, math.inf]])).tolist() == [[2.0, pytest.approx(1.2)]]


@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_greedy_determinant(ridge: float) -> None:
    """Each pick raises the determinant most, as computed anew for every candidate."""
    x, mask, number = rows(width=20)
    kernel = x @ x.transpose(1, 2) * 0.1
    got = taken(greedy_dpp(kernel, mask, number, 6, ridge))
    for row, count in enumerate(COUNTS):
        picks: list[int] = []
        full = kernel[row].double() + ridge * torch.eye(12, dtype=torch.float64)
        for _ in range(WANTED[row]):
            sets = [[*picks, i] for i in range(count) if i not in picks]
            gain = {of[-1]: float(torch.logdet(full[of][:, of])) for of in sets}
            gain = torch.tensor([gain.get(i, -math.inf) for i in range(count)])
            picks.append(next_pick(gain, picks, got[row], 1e-6))
        assert sorted(picks) == got[row]


def test_more_than_the_kernel_has_dimensions() -> None:
    """Never twice, and what says nothing new comes last, by its own entry."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(1, 60, 6, generator=g)
    kernel = x @ x.transpose(1, 2)
    mask = torch.ones(1, 60, dtype=torch.bool)
    six = set(taken(greedy_dpp(kernel, mask, torch.tensor([6]), 6))[0])
    assert torch.linalg.matrix_rank(x[0, list(six)]) == 6
    order = [i for i in x[0].square().sum(1).argsort(descending=True).tolist() if i not in six]
    for wanted in (7, 20, 60):
        (got,) = taken(greedy_dpp(kernel, mask, torch.tensor([wanted]), wanted))
        assert set(got) == six | set(order[: wanted - 6])
    same = torch.ones(1, 8, 8)
    assert taken(greedy_dpp(same, mask[:, :8], torch.tensor([3]), 3)) == [[0, 1, 2]]
    assert taken(greedy_dpp(0 * same, mask[:, :8], torch.tensor([3]), 3)) == [[0, 1, 2]]
    double = torch.eye(4).repeat_interleave(2, 0)[None]
    assert taken(greedy_dpp(double @ double.transpose(1, 2), mask[:, :8], torch.tensor([4]), 4)) == [[0, 2, 4, 6]]


def test_a_greedy_determinant_beside_a_ridge_loses_nothing() -> None:
    """Entries of 1e-6 beside a ridge of 1, which float32 would round away."""
    x = torch.randn(1, 30, 40, generator=torch.Generator().manual_seed(3))
    kernel, mask = 1e-6 * x @ x.transpose(1, 2), torch.ones(1, 30, dtype=torch.bool)
    (got,) = taken(greedy_dpp(kernel, mask, torch.tensor([9]), 9, ridge=1.0))
    assert got == sorted(x[0].square().sum(1).topk(9).indices.tolist())


def test_the_best_of_all_sets_is_not_far() -> None:
    """log det(I + L) is submodular: the greedy set reaches 1 - 1/e of the best."""
    x = torch.randn(1, 10, 4, generator=torch.Generator().manual_seed(4))
    kernel = x @ x.transpose(1, 2)

    def value(of: tuple[int, ...]) -> float:
        return float(torch.logdet(torch.eye(len(of)) + kernel[0][list(of)][:, list(of)]))

    (got,) = taken(greedy_dpp(kernel, torch.ones(1, 10, dtype=torch.bool), torch.tensor([3]), 3, ridge=1.0))
    assert value(tuple(got)) >= (1 - 1 / math.e) * max(value(of) for of in combinations(range(10), 3))


def test_unsuppressed() -> None:
    g = torch.Generator().manual_seed(5)
    near = torch.rand(3, 12, 12, generator=g) < 0.25  # whom a token removes is its own affair
    score = torch.randint(0, 6, (3, 12), generator=g).float()  # ties among them
    score[0, 2] = math.nan
    mask = torch.arange(12) < torch.tensor(COUNTS)[:, None]
    got = taken(unsuppressed(near, score, mask))
    for row, count in enumerate(COUNTS):
        order = sorted(range(count), key=lambda i: (-score[row, i].nan_to_num(nan=-1.0), i))
        gone: set[int] = set()
        for place, i in enumerate(order):
            if i not in gone:
                gone |= {j for j in order[place + 1 :] if near[row, i, j]}
        assert got[row] == [i for i in range(count) if i not in gone]
