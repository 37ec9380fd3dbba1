# SPDX-License-Identifier: Apache-2.0
"""The kernels that pair, rank and place tokens, against their references; these against loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenprune.kernels.join import destinations, join
from tokenprune.kernels.match import cosines
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.pairing import as_sources, pairing
from tokenprune.kernels.take import rank_in_group

from .test_kernels_compact import members

INF = torch.inf


def matched(rows: int, count: int, protected: int, counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Similarities with many ties, and partners that there are, as `best_partners` returns them."""
    g = torch.Generator().manual_seed(seed)
    best = torch.randint(-3, 4, (rows, (count + 1) // 2), generator=g) / 4
    best[torch.rand(best.shape, generator=g) < 0.2] = -2  # as of a vector that is not finite
    partner = torch.stack(
        [torch.randint(protected // 2, max(protected // 2 + 1, n // 2), best.shape[1:], generator=g) for n in counts]
    )
    return as_sources.reference(best, partner, protected, torch.tensor(counts))


@pytest.mark.parametrize("counts", [None, [9, 6, 0]])
@pytest.mark.parametrize("protected", [0, 1, 3])
def test_as_sources(kernel_device: torch.device, protected: int, counts: list[int] | None) -> None:
    best = torch.tensor([[1 - 2**-22, 0.3, -INF, -2.0, 0.75], [0.1, 1 + 2**-22, 0.2, -1.0, 1.0]]).repeat(2, 1)[:3]
    partner = torch.arange(15).view(3, 5) % 4
    real = None if counts is None else torch.tensor(counts)
    value, place = as_sources.reference(best, partner, protected, real)
    for row in range(3):
        for i in range(5):
            can = 2 * i >= protected and (counts is None or 2 * i < counts[row])
            near = float(best[row, i])
            want = round(near * 2**20) / 2**20 if can and near > -INF else -INF
            assert float(value[row, i]) == want and int(place[row, i]) == (int(partner[row, i]) if can else 0)
    got = as_sources.triton(
        best.to(kernel_device), partner.to(kernel_device), protected, None if real is None else real.to(kernel_device)
    )
    assert torch.equal(got[0].cpu(), value) and torch.equal(got[1].cpu(), place)


CASES = [  # tokens of each row, those that leave, protected
    ([7, 7], [3, 3], 0), ([8, 8], [2, 2], 1), ([9, 9, 9], [1, 1, 1], 2), ([40], [17], 3), ([5, 5], [2, 2], 1),
    ([9, 6, 3], [2, 1, 0], 1), ([9, 9], [0, 4], 0), ([4, 9, 9], [0, 3, 2], 3), ([12, 12], [5, 2], 2),
    ([2, 1], [1, 0], 0),
]  # fmt: skip


@pytest.mark.parametrize("alone", [2, 512])
@pytest.mark.parametrize(("counts", "gone", "protected"), CASES, ids=str)
def test_pairing(kernel_device: torch.device, counts: list[int], gone: list[int], protected: int, alone: int) -> None:
    best, partner = matched(len(counts), max(counts), protected, counts)
    even = min(counts) == max(counts) and min(gone) == max(gone)
    for by_place in (True, False) if even and protected == 0 else (True,):
        there = None if even else (torch.tensor(gone), torch.tensor(counts))
        want = pairing.reference(best, partner, gone, counts, protected, by_place, on_device=there)
        there = None if even else tuple(one.to(kernel_device) for one in there)
        on = best.to(kernel_device), partner.to(kernel_device)
        on = pairing.triton(*on, gone, counts, protected, by_place, on_device=there, alone=alone)
        for row, (count, less) in enumerate(zip(counts, gone, strict=True)):
            order = sorted(range(best.shape[1]), key=lambda i: (-float(best[row, i]), i))
            leave = order[:less]
            even = [i for i in range(0, count, 2) if i >= protected and i // 2 not in leave]
            if not by_place:
                even = [2 * i for i in order[less:]]
            odd = [i for i in range(1, count, 2) if i >= protected]
            stay = list(range(count)) if less == 0 else [*range(min(protected, count)), *even, *odd]
            into = [stay.index(2 * int(partner[row, i]) + 1) for i in leave]
            for keep, source, target in (want, on):
                assert keep[row, : count - less].tolist() == stay
                assert source[row, :less].tolist() == [2 * i for i in leave]
                assert target[row, :less].tolist() == into
                assert all(
                    int(one.min()) >= 0 and int(one.max()) < max(counts) for one in (keep, source) if one.numel()
                )


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 7), (3, 33)])
def test_rank_in_group(kernel_device: torch.device, rows: int, count: int, block: int) -> None:
    g = torch.Generator().manual_seed(count)
    group = torch.randint(3, (rows, count), generator=g)
    score = torch.tensor([0.0, -0.0, 1.0, torch.nan, INF, -INF])[torch.randint(6, (rows, count), generator=g)]
    flag = torch.rand(rows, count, generator=g) < 0.5
    whole = torch.randint(-2, 2, (rows, count), generator=g)
    pairs = ((score.double(), flag), (flag.to(torch.uint8), score), (whole, score))
    for keys in ((), (score,), (flag,), (score.bfloat16(),), *pairs):
        want = rank_in_group.reference(group, *keys)
        got = rank_in_group.triton(group.to(kernel_device), *(one.to(kernel_device) for one in keys), block=block)
        assert torch.equal(got.cpu(), want)
        for row in range(rows):

            def place(i: int, row: int = row, keys: tuple[Tensor, ...] = keys) -> tuple[float, ...]:
                plain = [float(one[row, i]) for one in keys]
                return *(x for one in plain for x in ((0, 0.0) if one != one else (1, -one))), i

            for number in range(3):
                own = sorted((i for i in range(count) if group[row, i] == number), key=place)
                assert [int(want[row, i]) for i in own] == list(range(len(own)))


def test_three_keys_are_compared_by_pytorch() -> None:
    one = torch.tensor([[1, 1, 2]])
    assert "two keys" in str(rank_in_group._limits(one, one, one, one))
    assert rank_in_group(torch.zeros_like(one), one, one, one).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 9), (3, 40)])
def test_destinations(kernel_device: torch.device, rows: int, count: int, weighted: bool) -> None:
    g = torch.Generator().manual_seed(count)
    assign = torch.randint(-1, count, (rows, count), generator=g)
    stays = torch.rand(rows, count, generator=g) < 0.4
    assign = torch.where(stays, torch.arange(count), assign)
    mask = torch.rand(rows, count, generator=g) < 0.8
    nowhere = rows * count + 3
    places = torch.randperm(nowhere, generator=g)[: rows * count].view(rows, count)
    weight = torch.rand(rows, count, generator=g).half() if weighted else None
    own, target = [0.0] * nowhere, []
    for s in range(rows):
        for n in range(count):
            to, one = int(assign[s, n]), 1.0 if weight is None else float(weight[s, n])
            if mask[s, n] and to == n:
                own[int(places[s, n])] = one
            target.append(int(places[s, to]) if mask[s, n] and to not in (-1, n) else nowhere)
    on = (None if one is None else one.to(kernel_device) for one in (assign, mask, places, weight))
    for got in (destinations.reference(assign, mask, places, weight, nowhere), destinations.triton(*on, nowhere)):
        assert got[0].tolist() == own and got[1].tolist() == target
        assert got[2].tolist() == ([1.0] * len(target) if weight is None else weight.float().flatten().tolist())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("a", "b", "width"), [(1, 1, 1), (9, 3, 20), (70, 8, 24)])
def test_cosines(kernel_device: torch.device, dtype: torch.dtype, a: int, b: int, width: int) -> None:
    g = torch.Generator().manual_seed(a)
    x, y = (torch.randn(2, n, width, generator=g).to(dtype) for n in (a, b))
    x[0, -1], x[1, 0, 0], y[1, -1, 0] = 0, torch.nan, INF
    want = torch.empty(2, a, b)
    for s in range(2):
        for i in range(a):
            for j in range(b):
                one, other = x[s, i].double(), y[s, j].double()
                lengths = one.norm().clamp(min=1e-12) * other.norm().clamp(min=1e-12)
                bad = not (one.isfinite().all() and other.isfinite().all())
                want[s, i, j] = torch.nan if bad else one @ other / lengths
    torch.testing.assert_close(cosines.reference(x, y), want, equal_nan=True, atol=1e-6, rtol=0)
    got = cosines.triton(x.to(kernel_device), y.to(kernel_device), blocks=(16, 16, 16))
    torch.testing.assert_close(got.cpu(), want, equal_nan=True, atol=1e-6, rtol=0)


def test_dropped_tokens_have_no_output_in_rows_of_different_lengths() -> None:
    is_kept = torch.tensor([[True, False, True], [False, True, False]])
    assert Merge.from_kept(is_kept, [2, 1]).assign.tolist() == [[0, -1, 1], [-1, 0, -1]]


def test_join_by_search_equals_join_by_sort(kernel_device: torch.device) -> None:
    """Bit by bit: the members of a token are added in the same order. More of them than are looked at together."""
    for n, m, r in ((13, 7, 40), (5, 2, 0), (40, 3, 37)):
        arguments = [one.to(kernel_device) for one in members(n, m, r, 9, torch.float32)]
        few, many = (join.triton(*arguments, block=16, few=few) for few in (True, False))
        assert torch.equal(few, many)
