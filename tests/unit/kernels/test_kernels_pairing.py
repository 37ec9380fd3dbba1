# SPDX-License-Identifier: Apache-2.0
"""Kernels that pair, rank and move tokens equal their references, and the references equal plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenprune.kernels.join import destinations, join
from tokenprune.kernels.match import cosines
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.pairing import as_sources, pairing
from tokenprune.kernels.take import rank_in_group

from .test_kernels_compact import draw_join

INF = torch.inf


def draw_partners(rows: int, count: int, protected: int, counts: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw similarities with many ties and valid partners, in the format of `best_partners`."""
    g = torch.Generator().manual_seed(seed)
    best = torch.randint(-3, 4, (rows, (count + 1) // 2), generator=g) / 4
    best[torch.rand(best.shape, generator=g) < 0.2] = -2  # the score of a vector with inf or NaN
    partner = torch.stack(
        [torch.randint(protected // 2, max(protected // 2 + 1, n // 2), best.shape[1:], generator=g) for n in counts]
    )
    return as_sources.reference(best, partner, protected, torch.tensor(counts))


@pytest.mark.parametrize("counts", [None, [9, 6, 0]])
@pytest.mark.parametrize("protected", [0, 1, 3])
def test_as_sources(kernel_device: torch.device, protected: int, counts: list[int] | None) -> None:
    best = torch.tensor([[1 - 2**-22, 0.3, -INF, -2.0, 0.75], [0.1, 1 + 2**-22, 0.2, -1.0, 1.0]]).repeat(2, 1)[:3]
    partner = torch.arange(15).view(3, 5) % 4
    num_valid = None if counts is None else torch.tensor(counts)
    value, partner_index = as_sources.reference(best, partner, protected, num_valid)
    for row in range(3):
        for i in range(5):
            is_source = 2 * i >= protected and (counts is None or 2 * i < counts[row])
            similarity = float(best[row, i])
            want = round(similarity * 2**20) / 2**20 if is_source and similarity > -INF else -INF
            assert float(value[row, i]) == want and int(partner_index[row, i]) == (
                int(partner[row, i]) if is_source else 0
            )
    got = as_sources.triton(
        best.to(kernel_device),
        partner.to(kernel_device),
        protected,
        None if num_valid is None else num_valid.to(kernel_device),
    )
    assert torch.equal(got[0].cpu(), value) and torch.equal(got[1].cpu(), partner_index)


CASES = [  # tokens per row, dropped tokens per row, protected tokens
    ([7, 7], [3, 3], 0), ([8, 8], [2, 2], 1), ([9, 9, 9], [1, 1, 1], 2), ([40], [17], 3), ([5, 5], [2, 2], 1),
    ([9, 6, 3], [2, 1, 0], 1), ([9, 9], [0, 4], 0), ([4, 9, 9], [0, 3, 2], 3), ([12, 12], [5, 2], 2),
    ([2, 1], [1, 0], 0),
]  # fmt: skip


@pytest.mark.parametrize("max_sorted_alone", [2, 512])
@pytest.mark.parametrize(("counts", "num_dropped", "protected"), CASES, ids=str)
def test_pairing(
    kernel_device: torch.device, counts: list[int], num_dropped: list[int], protected: int, max_sorted_alone: int
) -> None:
    best, partner = draw_partners(len(counts), max(counts), protected, counts)
    even = min(counts) == max(counts) and min(num_dropped) == max(num_dropped)
    for by_index in (True, False) if even and protected == 0 else (True,):
        count_tensors = None if even else (torch.tensor(num_dropped), torch.tensor(counts))
        want = pairing.reference(best, partner, num_dropped, counts, protected, by_index, on_device=count_tensors)
        count_tensors = None if even else tuple(tensor.to(kernel_device) for tensor in count_tensors)
        triton_data = best.to(kernel_device), partner.to(kernel_device)
        triton_data = pairing.triton(
            *triton_data, num_dropped, counts, protected, by_index, on_device=count_tensors, alone=max_sorted_alone
        )
        for row, (count, dropped) in enumerate(zip(counts, num_dropped, strict=True)):
            order = sorted(range(best.shape[1]), key=lambda i: (-float(best[row, i]), i))
            sources = order[:dropped]
            even = [i for i in range(0, count, 2) if i >= protected and i // 2 not in sources]
            if not by_index:
                even = [2 * i for i in order[dropped:]]
            odd = [i for i in range(1, count, 2) if i >= protected]
            kept = list(range(count)) if dropped == 0 else [*range(min(protected, count)), *even, *odd]
            targets = [kept.index(2 * int(partner[row, i]) + 1) for i in sources]
            for keep, source, target in (want, triton_data):
                assert keep[row, : count - dropped].tolist() == kept
                assert source[row, :dropped].tolist() == [2 * i for i in sources]
                assert target[row, :dropped].tolist() == targets
                assert all(
                    int(tensor.min()) >= 0 and int(tensor.max()) < max(counts)
                    for tensor in (keep, source)
                    if tensor.numel()
                )


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 7), (3, 33)])
def test_rank_in_group(kernel_device: torch.device, rows: int, count: int, block: int) -> None:
    g = torch.Generator().manual_seed(count)
    group = torch.randint(3, (rows, count), generator=g)
    score = torch.tensor([0.0, -0.0, 1.0, torch.nan, INF, -INF])[torch.randint(6, (rows, count), generator=g)]
    flag = torch.rand(rows, count, generator=g) < 0.5
    integers = torch.randint(-2, 2, (rows, count), generator=g)
    pairs = ((score.double(), flag), (flag.to(torch.uint8), score), (integers, score))
    for keys in ((), (score,), (flag,), (score.bfloat16(),), *pairs):
        want = rank_in_group.reference(group, *keys)
        got = rank_in_group.triton(group.to(kernel_device), *(key.to(kernel_device) for key in keys), block=block)
        assert torch.equal(got.cpu(), want)
        for row in range(rows):

            def sort_key(i: int, row: int = row, keys: tuple[Tensor, ...] = keys) -> tuple[float, ...]:
                values = [float(key[row, i]) for key in keys]
                return *(x for key in values for x in ((0, 0.0) if key != key else (1, -key))), i

            for group_id in range(3):
                members = sorted((i for i in range(count) if group[row, i] == group_id), key=sort_key)
                assert [int(want[row, i]) for i in members] == list(range(len(members)))


def test_three_keys_are_compared_by_pytorch() -> None:
    keys = torch.tensor([[1, 1, 2]])
    assert "two keys" in str(rank_in_group._limits(keys, keys, keys, keys))
    assert rank_in_group(torch.zeros_like(keys), keys, keys, keys).tolist() == [[1, 2, 0]]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 9), (3, 40)])
def test_destinations(kernel_device: torch.device, rows: int, count: int, weighted: bool) -> None:
    g = torch.Generator().manual_seed(count)
    assign = torch.randint(-1, count, (rows, count), generator=g)
    is_kept = torch.rand(rows, count, generator=g) < 0.4
    assign = torch.where(is_kept, torch.arange(count), assign)
    mask = torch.rand(rows, count, generator=g) < 0.8
    sentinel = rows * count + 3
    slots = torch.randperm(sentinel, generator=g)[: rows * count].view(rows, count)
    weight = torch.rand(rows, count, generator=g).half() if weighted else None
    own_weight, target = [0.0] * sentinel, []
    for s in range(rows):
        for n in range(count):
            destination, token_weight = int(assign[s, n]), 1.0 if weight is None else float(weight[s, n])
            if mask[s, n] and destination == n:
                own_weight[int(slots[s, n])] = token_weight
            target.append(int(slots[s, destination]) if mask[s, n] and destination not in (-1, n) else sentinel)
    on_device = (
        None if token_weight is None else token_weight.to(kernel_device)
        for token_weight in (assign, mask, slots, weight)
    )
    for got in (
        destinations.reference(assign, mask, slots, weight, sentinel),
        destinations.triton(*on_device, sentinel),
    ):
        assert got[0].tolist() == own_weight and got[1].tolist() == target
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
                left, right = x[s, i].double(), y[s, j].double()
                lengths = left.norm().clamp(min=1e-12) * right.norm().clamp(min=1e-12)
                is_not_finite = not (left.isfinite().all() and right.isfinite().all())
                want[s, i, j] = torch.nan if is_not_finite else left @ right / lengths
    torch.testing.assert_close(cosines.reference(x, y), want, equal_nan=True, atol=1e-6, rtol=0)
    got = cosines.triton(x.to(kernel_device), y.to(kernel_device), blocks=(16, 16, 16))
    torch.testing.assert_close(got.cpu(), want, equal_nan=True, atol=1e-6, rtol=0)


def test_dropped_tokens_have_no_output_in_rows_of_different_lengths() -> None:
    is_kept = torch.tensor([[True, False, True], [False, True, False]])
    assert Merge.from_kept(is_kept, [2, 1]).assign.tolist() == [[0, -1, 1], [-1, 0, -1]]


def test_join_by_search_equals_join_by_sort(kernel_device: torch.device) -> None:
    """Both add the members of a token in the same order, so results are bit-equal, also beyond one block."""
    for n, m, r in ((13, 7, 40), (5, 2, 0), (40, 3, 37)):
        arguments = [tensor.to(kernel_device) for tensor in draw_join(n, m, r, 9, torch.float32)]
        by_search, by_sort = (join.triton(*arguments, block=16, few=by_search) for by_search in (True, False))
        assert torch.equal(by_search, by_sort)
