# SPDX-License-Identifier: Apache-2.0
"""Greedy coverage, greedy determinants and suppression equal plain loops, also in ragged batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from far_device import Far, counting
from greedy import next_pick
from tokenprune.kernels import coverage as coverage_module
from tokenprune.kernels import pairs, suppress
from tokenprune.kernels.coverage import Coverage, cosine_products, cosines, coverage_gain, greedy_cover, most_covering
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import Products, Relation, TableRelation
from tokenprune.kernels.suppress import non_maximum_suppression

COUNTS, NUM_PICKS = [12, 7, 1], [5, 6, 1]


def make_rows(width: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the vectors of three rows with nonzero padding, their mask and the number of picks per row."""
    mask = torch.arange(12) < torch.tensor(COUNTS)[:, None]
    x = torch.randn(3, 12, width, generator=torch.Generator().manual_seed(seed))
    return x.masked_fill(~mask.unsqueeze(2), 7.0), mask, torch.tensor(NUM_PICKS)


def list_kept(keep: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


def test_cosines() -> None:
    x, mask, _ = make_rows()
    x[0, 3] = math.nan
    x[0, 4] = 0
    x[0, 6] = 3 * x[0, 5]
    got = cosines(x, mask=mask)
    for row in range(3):
        for i in range(12):
            for j in range(12):
                a, b = x[row, i].double(), x[row, j].double()
                is_valid = i < COUNTS[row] and j < COUNTS[row] and not {i, j} & ({3, 4} if row == 0 else set())
                want = float(a @ b / (a.norm() * b.norm())) if is_valid else 0.0
                assert float(got[row, i, j]) == pytest.approx(want, abs=1e-6)
    assert torch.equal(got, got.transpose(1, 2))
    assert got[0, 5, 6] == got[0, 5, 5] == 1 and torch.equal(got[0, 5], got[0, 6])
    assert torch.equal(got, (got * 2**20).round() / 2**20)
    other = cosines(x, x[:, :2], mask)
    assert torch.allclose(other[:2], got[:2, :, :2], atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_most_covering(weighted: bool) -> None:
    _, mask, num_picks = make_rows()
    g = torch.Generator().manual_seed(1)
    table = torch.rand(3, 9, 12, generator=g) * (torch.arange(9) < torch.tensor([9, 4, 2])[:, None])[:, :, None]
    factor = torch.rand(3, 12, generator=g) if weighted else None
    got = list_kept(most_covering(table, mask, num_picks, 6, factor))
    for row, count in enumerate(COUNTS):
        picks: list[int] = []
        for _ in range(NUM_PICKS[row]):
            covered = [max((float(table[row, r, i]) for i in picks), default=0.0) for r in range(9)]
            gain = [sum(max(0.0, float(table[row, r, i]) - covered[r]) for r in range(9)) for i in range(count)]
            gain = torch.tensor(gain, dtype=torch.float64) * (factor[row, :count] if weighted else 1)
            picks.append(next_pick(gain, picks, got[row], 1e-6))
        assert sorted(picks) == got[row]


@pytest.mark.parametrize("weighted", [False, True])
def test_updated_gains_equal_recomputed_gains(weighted: bool) -> None:
    """Gains updated after each pick equal gains computed anew, on the CPU and on a simulated device."""
    x, mask, _ = make_rows()
    x[:, 4] = x[:, 3]
    g = torch.Generator().manual_seed(1)
    other, weight = torch.rand(3, 5, 12, generator=g), torch.ones(3, 12)
    if weighted:
        weight = torch.rand(3, 12, generator=g)
    relations = [Relation(cosine_products(x, mask), torch.mul, weight), TableRelation(other)]
    direction = Far(relations[0].products.a)
    far_relations = [Relation(Products(direction, round_=True), torch.mul, Far(weight)), TableRelation(Far(other))]
    with counting() as syncs:
        coverage, far = Coverage(relations, start=-1.0), Coverage(far_relations, start=-1.0)
        table = torch.cat([relation.table for relation in relations], dim=1).double()
        covered = torch.full((3, 17), -1.0, dtype=torch.float64)
        for pick in [*torch.randint(12, (6, 3), generator=g), *torch.arange(12)[:, None].expand(-1, 3)]:
            for cover in (coverage, far):
                cover.take(Far(pick) if cover is far else pick)
            covered = torch.maximum(covered, table[torch.arange(3), :, pick])
            want = (table - covered[:, :, None]).clamp(min=0).sum(1)
            assert torch.allclose(coverage.gain.double(), want, atol=0, rtol=1e-7)
            assert torch.equal(coverage.gain == 0, want == 0)
            assert torch.equal(torch.cat(coverage.cover, dim=1).double(), covered)
            assert torch.allclose(far.gain.cpu().double(), want, atol=1e-5)
        assert not coverage.gain.any() and not syncs.ours


def test_copies_tie_and_the_first_is_selected() -> None:
    """Copies keep equal gains at any index, although sums over several rounds may round differently."""
    g = torch.Generator().manual_seed(7)
    table = torch.rand(1, 301, 12, generator=g).pow(20)[..., torch.arange(301) % 12]
    coverage = Coverage([TableRelation(table)])
    for pick in range(12):
        gain = coverage.gain[0]
        assert all(torch.equal(gain[index::12], gain[index].expand(len(gain[index::12]))) for index in range(12))
        coverage.take(torch.tensor([pick + 12]))
    assert not coverage.gain.any()
    num_picks = torch.tensor([14])  # 12 distinct candidates, then copies without gain
    assert list_kept(most_covering(table, torch.ones(1, 301, dtype=torch.bool), num_picks, 14)) == [[*range(14)]]


def test_the_same_picks_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relations computed in blocks give the same results as a table, with copies among the tokens."""
    x, mask, num_picks = make_rows(width=24)
    x[:, 8:] = x[:, :4]
    g = torch.Generator().manual_seed(1)
    weight, factor = torch.rand(3, 12, generator=g), torch.rand(3, 12, generator=g)

    def compute() -> list[Tensor]:
        relation = Relation(
            cosine_products(x, mask),
            lambda similarity, weight: (similarity + 1) / 2 * weight,
            weight.masked_fill(~mask, 0),
        )
        sums = relation.products.reduce_rows(lambda rows, segment, start: rows.triu(start).sum(1))
        close = Relation(cosine_products(x, mask), lambda similarity, weight: similarity > weight - 0.5, weight)
        indices = torch.arange(12)
        results = [torch.stack([relation.rows(s, indices) for s in range(3)])]
        for index in range(12):
            assert torch.equal(torch.stack([relation.column(s, index) for s in range(3)]), results[0][:, :, index])
        results += [sums]
        return [
            *results,
            greedy_cover([relation], mask, num_picks, 6, factor),
            non_maximum_suppression(close, factor, mask),
        ]

    expected = compute()
    monkeypatch.setattr(Products, "fits_in_memory", False)
    for max_elements in (2**22, 30):
        monkeypatch.setattr(pairs, "_MAX_ELEMENTS", max_elements)
        monkeypatch.setattr(coverage_module, "_MAX_ELEMENTS", max_elements)
        assert all(torch.equal(*both) for both in zip(compute(), expected, strict=True))


def draw_num_picks(mask: Tensor, max_picks: int) -> Tensor:
    """Return the picks per row: `max_picks` in the first row, fewer in later rows, at most its valid tokens."""
    return torch.tensor([max(0, min(int(count), max_picks - 2 * row)) for row, count in enumerate(mask.sum(1))])


@pytest.mark.parametrize(("s", "n", "r", "max_picks"), [(1, 1, 1, 1), (2, 13, 37, 5), (1, 5, 0, 5), (1, 6, 3, 6)])
def test_the_picks_of_the_kernel(kernel_device: torch.device, s: int, n: int, r: int, max_picks: int) -> None:
    """The kernel equals the reference for odd shapes, strides, copies, uncovered rows and different picks per row."""
    g = torch.Generator().manual_seed(n)
    table = torch.randint(-2, 9, (s, r, 2 * n), generator=g)[..., ::2].float()  # sums are exact
    table[..., n - n // 2 :] = table[..., : n // 2].clone()
    mask = torch.rand(s, n, generator=g) < 0.9
    num_picks = draw_num_picks(mask, max_picks)
    for factor in (None, torch.randint(0, 3, (s, n), generator=g).float()):
        want = most_covering.reference(table, mask, num_picks, max_picks, factor)
        assert want.sum(1).tolist() == num_picks.tolist()
        on_device = [tensor.to(kernel_device) for tensor in (table, mask, num_picks)]
        weight = None if factor is None else factor.to(kernel_device)
        assert torch.equal(most_covering.triton(*on_device, max_picks, weight, blocks=(8, 16)).cpu(), want)
    assert torch.equal(most_covering.triton(*on_device, max_picks, weight).cpu(), want)
    assert "float32" in most_covering.get_unsupported_reason(on_device[0].half(), *on_device[1:], max_picks)
    assert most_covering.triton(*(tensor[..., :0] for tensor in on_device[:2]), num_picks, 0).shape == (s, 0)


@pytest.mark.parametrize(("s", "n", "d", "max_picks"), [(1, 1, 1, 1), (2, 19, 40, 6), (1, 11, 4, 8)])
def test_the_greedy_determinant_of_the_kernel(
    kernel_device: torch.device, s: int, n: int, d: int, max_picks: int
) -> None:
    """The kernel equals the reference beyond the rank, with copies, zero vectors and another left side."""
    g = torch.Generator().manual_seed(n + d)
    x = torch.randn(s, n, 2 * d, generator=g)[..., ::2] * (1 + torch.rand(s, n, 1, generator=g))
    x[:, n - n // 3 :] = x[:, : n // 3].clone()
    x[:, 5::9] = 0
    mask = torch.rand(s, n, generator=g) < 0.9
    num_picks = draw_num_picks(mask, max_picks)
    for ridge, a in ((0.0, x), (1.0, 0.5 * x)):
        want = greedy_dpp.reference(a, x, mask, num_picks, max_picks, ridge)
        assert want.sum(1).tolist() == num_picks.tolist()
        on_device = [tensor.to(kernel_device) for tensor in (a, x, mask, num_picks)]
        assert torch.equal(greedy_dpp.triton(*on_device, max_picks, ridge, blocks=(8, 16, 2)).cpu(), want)
    assert torch.equal(greedy_dpp.triton(*on_device, max_picks, ridge).cpu(), want)
    assert "float32" in greedy_dpp.get_unsupported_reason(on_device[0].half(), *on_device[1:], max_picks)
    assert greedy_dpp.triton(x[:, :0], x[:, :0], mask[:, :0], num_picks, 0).shape == (s, 0)


def test_greedy_dpp_does_not_synchronize() -> None:
    x, mask, num_picks = *make_rows(width=20)[:2], torch.tensor([5, 3, 1])
    with counting() as syncs:
        got = greedy_dpp(Far(x), Far(x), Far(mask), Far(num_picks), 6)
        assert not syncs.ours
        assert torch.equal(got.cpu(), greedy_dpp(x, x, mask, num_picks, 6))


@pytest.mark.parametrize(("s", "n", "r"), [(1, 1, 1), (2, 13, 37), (3, 9, 16), (1, 0, 4)])
def test_coverage_gain_kernel_equals_reference(kernel_device: torch.device, s: int, n: int, r: int) -> None:
    g = torch.Generator().manual_seed(s)
    table, covered = torch.randn(s, r, 2 * n, generator=g)[..., ::2], torch.rand(s, r, generator=g)
    covered[:, 0] = math.inf
    for blocks in ((32, 64), (4, 16)):
        got = coverage_gain.triton(table.to(kernel_device), covered.to(kernel_device), blocks=blocks)
        torch.testing.assert_close(got.cpu(), coverage_gain.reference(table, covered), atol=1e-5, rtol=1e-5)
    assert "float32" in coverage_gain.get_unsupported_reason(table.half().to(kernel_device), covered.to(kernel_device))


def test_excluded_row_adds_no_gain() -> None:
    table = torch.tensor([[[1.0, 0.2], [-0.5, 3.0]]])
    assert coverage_gain(table, torch.tensor([[0.0, 0.0]])).tolist() == [[1.0, pytest.approx(3.2)]]
    assert coverage_gain(table, torch.tensor([[-1.0, math.inf]])).tolist() == [[2.0, pytest.approx(1.2)]]


@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_greedy_determinant(ridge: float) -> None:
    x, mask, num_picks = make_rows(width=20)
    kernel = x @ x.transpose(1, 2) * 0.1
    got = list_kept(greedy_dpp(0.1 * x, x, mask, num_picks, 6, ridge))
    for row, count in enumerate(COUNTS):
        picks: list[int] = []
        matrix = kernel[row].double() + ridge * torch.eye(12, dtype=torch.float64)
        for _ in range(NUM_PICKS[row]):
            sets = [[*picks, i] for i in range(count) if i not in picks]
            gain = {subset[-1]: float(torch.logdet(matrix[subset][:, subset])) for subset in sets}
            gain = torch.tensor([gain.get(i, -math.inf) for i in range(count)])
            picks.append(next_pick(gain, picks, got[row], 1e-6))
        assert sorted(picks) == got[row]


def test_known_diagonal_breaks_ties_by_index(kernel_device: torch.device) -> None:
    """Equal lengths may differ by rounding, which depends on the processor and the batch."""
    x = torch.eye(5)[None] * torch.tensor([1.0, 1 + 1e-6, 1.0, 1 + 3e-6, 1.0])[:, None]
    mask, num_picks = torch.ones(1, 5, dtype=torch.bool), torch.tensor([2])
    for select in (greedy_dpp.reference, greedy_dpp.triton):
        x, mask, num_picks = (tensor.to(kernel_device) for tensor in (x, mask, num_picks))
        assert list_kept(select(x, x, mask, num_picks, 2).cpu()) == [[1, 3]]
        assert list_kept(select(x, x, mask, num_picks, 2, 0.0, torch.ones(1, 5).to(kernel_device)).cpu()) == [[0, 1]]


def test_more_picks_than_the_rank() -> None:
    """Picks beyond the rank are distinct and ordered by their diagonal entry."""
    g = torch.Generator().manual_seed(2)
    x = torch.randn(1, 60, 6, generator=g)
    mask = torch.ones(1, 60, dtype=torch.bool)
    independent = set(list_kept(greedy_dpp(x, x, mask, torch.tensor([6]), 6))[0])
    assert torch.linalg.matrix_rank(x[0, list(independent)]) == 6
    order = [i for i in x[0].square().sum(1).argsort(descending=True).tolist() if i not in independent]
    for num_picks in (7, 20, 60):
        (got,) = list_kept(greedy_dpp(x, x, mask, torch.tensor([num_picks]), num_picks))
        assert set(got) == independent | set(order[: num_picks - 6])
    same = torch.ones(1, 8, 1)
    assert list_kept(greedy_dpp(same, same, mask[:, :8], torch.tensor([3]), 3)) == [[0, 1, 2]]
    assert list_kept(greedy_dpp(0 * same, same, mask[:, :8], torch.tensor([3]), 3)) == [[0, 1, 2]]
    double = torch.eye(4).repeat_interleave(2, 0)[None]
    assert list_kept(greedy_dpp(double, double, mask[:, :8], torch.tensor([4]), 4)) == [[0, 2, 4, 6]]


def test_greedy_dpp_with_ridge_keeps_precision() -> None:
    """Entries of 1e-6 beside a ridge of 1 would vanish in float32."""
    x = torch.randn(1, 30, 40, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(1, 30, dtype=torch.bool)
    (got,) = list_kept(greedy_dpp(1e-6 * x, x, mask, torch.tensor([9]), 9, ridge=1.0))
    assert got == sorted(x[0].square().sum(1).topk(9).indices.tolist())


@pytest.mark.parametrize("block", [1, 5, 256])
def test_non_maximum_suppression(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(5)
    is_close = torch.rand(3, 12, 12, generator=g) < 0.25  # random pairs, also asymmetric
    score = torch.randint(0, 6, (3, 12), generator=g).float()  # ties among them
    score[0, 2] = math.nan
    mask = torch.arange(12) < torch.tensor(COUNTS)[:, None]
    monkeypatch.setattr(suppress, "_BLOCK", block)
    got = list_kept(non_maximum_suppression(TableRelation(is_close), score, mask))
    with counting() as syncs:
        far_result = non_maximum_suppression(TableRelation(Far(is_close)), Far(score), Far(mask))
        assert not syncs.ours
        assert list_kept(far_result.cpu()) == got
    for row, count in enumerate(COUNTS):
        order = sorted(range(count), key=lambda i: (-score[row, i].nan_to_num(nan=-1.0), i))
        suppressed: set[int] = set()
        for rank, i in enumerate(order):
            if i not in suppressed:
                suppressed |= {j for j in order[rank + 1 :] if is_close[row, i, j]}
        assert got[row] == [i for i in range(count) if i not in suppressed]
