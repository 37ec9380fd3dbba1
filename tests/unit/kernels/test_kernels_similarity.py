# SPDX-License-Identifier: Apache-2.0
"""Kernels that compare and select tokens equal their references, and references limit their memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from each import each
from tokenprune.kernels import farthest as farthest_module
from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import take_in_turn, top_mask

HALVES_TOO = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
BAD = [0.0, torch.inf, torch.nan]


def draw_corners(*shape: int, seed: int = 0) -> Tensor:
    """Draw vectors of -1 and 1. At width 4 or 16 all cosines are exact, with many ties."""
    return 2.0 * torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) - 1


def draw_normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_mask(counts: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(counts)[:, None]


def check_match(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(got[0].cpu(), want[0], atol=2e-6, rtol=0)
    assert torch.equal(got[1].cpu(), want[1])


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest new tensor."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@HALVES_TOO
@pytest.mark.parametrize(("s", "a", "b", "d"), [(1, 1, 1, 1), (2, 7, 5, 9), (1, 33, 18, 20)])
def test_best_match(kernel_device: torch.device, dtype: torch.dtype, s: int, a: int, b: int, d: int) -> None:
    x, y = draw_normal(s, a, d).to(dtype), draw_normal(s, b, d, seed=1).to(dtype)
    x, y = x.to(kernel_device), y.to(kernel_device)
    for blocks in ((16, 16, 16), None):
        check_match(best_match.triton(x, y, blocks=blocks), best_match.reference(x.cpu(), y.cpu()))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("parts", [1, 2])
def test_best_match_with_ties_bad_vectors_and_nothing_allowed(kernel_device: torch.device, parts: int) -> None:
    x = draw_corners(3, 19, 4)
    x[0, 3], x[1, 8] = torch.nan, torch.inf
    groups = torch.arange(19).expand(3, -1) // 7
    allowed = make_mask([19, 12, 0], 19) & (torch.arange(19) % 3 > 0)
    cases = [
        dict(), dict(allowed=allowed), dict(allowed=allowed, exclude_self=True),
        dict(allowed=allowed, group_a=groups, group_b=groups),
    ]  # fmt: skip
    for case in cases:
        want = best_match.reference(x, x, **case)
        case_on_device = {k: v.to(kernel_device) if isinstance(v, Tensor) else v for k, v in case.items()}
        x_on_device = x.to(kernel_device)
        check_match(
            best_match.triton(x_on_device, x_on_device, **case_on_device, blocks=(16, 16, 16), parts=parts), want
        )
    # Views of every second token.
    check_match(
        best_match.triton(x_on_device[:, ::2], x_on_device[:, 1::2], blocks=(16, 16, 16)),
        best_match.reference(x[:, ::2], x[:, 1::2]),
    )


def test_best_match_is_the_first_of_the_most_similar(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = draw_corners(2, 13, 16), draw_corners(2, 9, 16, seed=1)
    x[0, 2] = 0
    allowed, group_a, group_b = (
        make_mask([9, 6], 9),
        torch.arange(13).expand(2, -1) % 3,
        torch.arange(9).expand(2, -1) % 2,
    )
    # Blocks of one row, of a few and of all rows; the search for the maximum in one block and in several blocks.
    for max_elements, block in ((1, 64), (50, 64), (2**22, 64), (2**22, 1)):
        monkeypatch.setattr("tokenprune.kernels.match._MAX_ELEMENTS", max_elements)
        monkeypatch.setattr("tokenprune.kernels.match._BLOCK", block)
        for case in (dict(), dict(group_a=group_a, group_b=group_b)):
            best, index = best_match.reference(x, y, allowed, **case)
            for s in range(2):
                for i in range(13):
                    same_group = [j for j in range(9) if allowed[s, j] and group_b[s, j] == group_a[s, i]]
                    pool = same_group if same_group and case else [j for j in range(9) if allowed[s, j]]
                    cosine = {j: float(x[s, i] @ y[s, j]) / 16 for j in pool}
                    first = max(pool, key=lambda j: (cosine[j], -j))
                    assert (float(best[s, i]), int(index[s, i])) == (cosine[first], first)


def test_best_match_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the block size, with ties, non-finite vectors and groups."""
    x, y = draw_corners(2, 30, 4), draw_corners(2, 83, 4, seed=1)
    allowed = torch.rand(2, 83, generator=torch.Generator().manual_seed(2)) < 0.5
    zeros, groups = torch.zeros(2, 83, dtype=torch.long), torch.arange(83).expand(2, -1) % 3
    not_finite, partly_allowed = x.clone(), allowed.clone()
    not_finite[0, 3], not_finite[1, 4], partly_allowed[1] = torch.nan, torch.inf, False
    for a in (x, not_finite):
        for allowed_keys in (None, allowed, partly_allowed):
            for group in (None, zeros, groups):
                case = {} if group is None else dict(group_a=group[:, :30], group_b=group)
                results = []
                for block in (64, 5):
                    monkeypatch.setattr("tokenprune.kernels.match._BLOCK", block)
                    results.append(best_match.reference(a, y, allowed_keys, **case))
                assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
                if group is zeros:
                    plain = best_match.reference(a, y, allowed_keys)
                    assert all(torch.equal(*pair) for pair in zip(results[0], plain, strict=True))


@each("width", [64, 72, 1024])
@each(("a", "b"), [(1, 7), (1, 50), (1, 577), (24, 50)])
def test_equal_vectors_tie_at_any_index(a: int, b: int, width: int) -> None:
    """A plain matrix product gives equal rows and columns values that differ in the last digits."""
    x, y = draw_normal(4, a, width), draw_normal(4, 1, width, seed=1).expand(-1, b, -1).clone()
    x[1:] = x[:1]
    x[:, a // 2 :] = x[:, : a - a // 2]
    y[1:] = y[:1]
    best, index = best_match.reference(x, y)
    assert not index.any()
    assert torch.equal(best[1:], best[:1].expand(3, -1)) and torch.equal(best[:, a // 2 :], best[:, : a - a // 2])
    # Two copies among other vectors.
    y = draw_normal(4, b, width, seed=2)
    y[:, b // 2] = y[:, -1] = 2 * x[:, -1]
    assert (best_match.reference(x, y)[1][:, -1] == b // 2).all()


@pytest.mark.parametrize("parts", [1, 2])
def test_nearly_equal_vectors_tie(kernel_device: torch.device, parts: int) -> None:
    """The first vector within rounding of the maximum wins, also across tiles and parts."""
    x = draw_normal(1, 5, 32)
    y = draw_normal(1, 40, 32, seed=1)
    for i, indices in enumerate(((3, 5), (2, 39), (17, 18), (6, 30), (0, 20))):
        y[0, indices[0]] = x[0, i] * (1 + 2e-7)
        y[0, indices[0], i] += 3e-4  # a cosine lower by about 1e-8
        y[0, indices[1]] = x[0, i] * 3
    want = torch.tensor([[3, 2, 17, 6, 0]])
    assert torch.equal(best_match.reference(x, y)[1], want)
    got = best_match.triton(x.to(kernel_device), y.to(kernel_device), blocks=(16, 16, 16), parts=parts)
    assert torch.equal(got[1].cpu(), want)


@HALVES_TOO
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize(("s", "n", "d"), [(1, 1, 3), (1, 16, 16), (2, 19, 20)])
def test_farthest(kernel_device: torch.device, dtype: torch.dtype, table: bool, s: int, n: int, d: int) -> None:
    x = draw_normal(s, n, d).to(dtype)
    counts = [n - 4 * row for row in range(s)]
    budget = torch.tensor([min(count, 5 - row) for row, count in enumerate(counts)])
    mask, max_budget = make_mask(counts, n), int(budget.max())
    want = farthest.reference(x, mask, budget, max_budget)
    assert want.sum(1).tolist() == budget.tolist()
    arguments = [t.to(kernel_device) for t in (x, mask, budget)]
    got = farthest.triton(*arguments, max_budget, table=table, blocks=(16, 16, 16), rows=8)
    assert torch.equal(got.cpu(), want)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes in NumPy
@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("bad", BAD)
def test_farthest_with_ties_and_bad_vectors(
    kernel_device: torch.device, table: bool, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw_corners(3, 15, 16)
    x[0, 9:12] = x[0, 0:3]
    x[1, 4] = x[2, 14] = bad  # the second token is padding
    mask, max_budget, budget = make_mask([15, 10, 0], 15), 5, torch.tensor([5, 4, 0])
    mask[0, :2] = False
    monkeypatch.setattr(farthest_module, "TABLE", 4096 if table else 0)
    want = farthest.reference(x, mask, budget, max_budget)
    assert want.sum(1).tolist() == budget.tolist()
    got = farthest.triton(*(t.to(kernel_device) for t in (x, mask, budget)), max_budget, blocks=(16, 16, 16), rows=8)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("bad", [None, *BAD])
def test_farthest_with_a_table_and_without(bad: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x, mask = draw_normal(3, 40, 8), make_mask([40, 23, 1], 40)
    monkeypatch.setattr("tokenprune.kernels.match._MAX_ELEMENTS", 3 * 40 * 7)  # seven rows at a time
    if bad is not None:
        x[:, 7] = bad
    for budget in (torch.tensor([40, 5, 1]), torch.tensor([1, 22, 1])):
        want = farthest.reference(x, mask, budget, int(budget.max()))
        for row in range(3):  # a single segment takes another code path
            row_slice = slice(row, row + 1)
            single = farthest.reference(x[row_slice], mask[row_slice], budget[row_slice], int(budget[row]))
            assert torch.equal(single, want[row_slice])
        with monkeypatch.context() as patch:
            patch.setattr(farthest_module, "fits_table", lambda features: False)
            assert torch.equal(farthest.reference(x, mask, budget, int(budget.max())), want)


@HALVES_TOO
@pytest.mark.parametrize(("s", "p", "n"), [(1, 1, 1), (2, 3, 7), (2, 1, 33)])
def test_take_in_turn(kernel_device: torch.device, dtype: torch.dtype, s: int, p: int, n: int) -> None:
    score, inf, nan = draw_corners(s, p, n).to(dtype), torch.inf, torch.nan
    special = torch.tensor([inf, -inf, nan, -nan, -0.0, 0.0, 65504.0, -65504.0, 1e-7], dtype=dtype)
    g = torch.Generator().manual_seed(1)
    odd = torch.rand(score.shape, generator=g) < 0.5
    score = torch.where(odd, special[torch.randint(len(special), score.shape, generator=g)], score)
    mask = torch.rand(s, n, generator=g) < 0.8
    mask[-1] &= s == 1  # fully masked
    for max_count in (n // 3, n):
        count = torch.randint(0, max_count + 1, (s, p), generator=g)
        count[0, 0] = max_count
        want = mask.clone()
        for row in range(s):
            for turn in range(p):
                pool = want[row].nonzero().flatten().tolist()
                key = {i: -inf if (v := float(score[row, turn, i])) != v else v for i in pool}
                best = sorted(pool, key=lambda i: (-key[i], i))[: int(count[row, turn])]
                want[row, best] = False
        want = mask & ~want
        assert torch.equal(take_in_turn.reference(score, mask, count, max_count), want)
        got = take_in_turn.triton(*(t.to(kernel_device) for t in (score, mask, count)), max_count, block=16)
        assert torch.equal(got.cpu(), want)


def test_ties_over_several_tiles_go_to_the_first(kernel_device: torch.device) -> None:
    score, mask = torch.zeros(1, 2, 40), torch.arange(40)[None] % 5 != 0
    args = score, mask, torch.tensor([[20, 9]])
    want = mask & (mask.cumsum(1) <= 29)
    assert torch.equal(take_in_turn.reference(*args, 20), want)
    assert torch.equal(take_in_turn.triton(*(t.to(kernel_device) for t in args), 20, block=16).cpu(), want)


def test_zeros_of_either_sign_tie(kernel_device: torch.device) -> None:
    score, mask = torch.tensor([[[-1.0, -0.0, 0.0, -0.0, 0.0]]]), torch.ones(1, 5, dtype=torch.bool)
    for take in (take_in_turn.reference, take_in_turn.triton):
        got = take(*(t.to(kernel_device) for t in (score, mask, torch.tensor([[2]]))), 2)
        assert got.tolist() == [[False, True, True, False, False]]


def test_top_mask_is_limited_by_the_mask() -> None:
    score, mask = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[True, False, True]])
    assert top_mask(score, mask, torch.tensor([3]), 3).tolist() == mask.tolist()
    assert top_mask(score, mask, torch.tensor([1]), 3).tolist() == [[False, False, True]]
    assert top_mask(score[:, :0], mask[:, :0], torch.tensor([0]), 0).shape == (1, 0)


def test_no_matrix_of_all_tokens_by_all_tokens() -> None:
    count = 8192
    x, mask = draw_normal(1, count, 8), torch.ones(1, count, dtype=torch.bool)
    with LargestTensor() as largest:
        best_match(x, x, mask, exclude_self=True)
        best_match(x[:, ::2], x[:, 1::2])
        farthest(x, mask, torch.tensor([3]), 3)
    assert count * 8 <= largest.size <= count * count // 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real shapes need a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_shapes(dtype: torch.dtype) -> None:
    for s, n, d, keep in ((5, 576, 1024, 64), (1, 2880, 4096, 320), (1, 6000, 1024, 40)):
        x = draw_corners(s, n, d).to(dtype).cuda()
        mask, budget = make_mask([n - 3 * i for i in range(s)], n).cuda(), torch.full((s,), keep).cuda()
        got = best_match.triton(x[:, ::2], x[:, 1::2], mask[:, 1::2])
        check_match(got, tuple(t.cpu() for t in best_match.reference(x[:, ::2], x[:, 1::2], mask[:, 1::2])))
        assert torch.equal(farthest.triton(x, mask, budget, keep), farthest.reference(x, mask, budget, keep))
        count = torch.tensor([[keep, 0, 7]]).cuda().expand(s, -1)
        args = draw_corners(s, 3, n).cuda(), mask, count, keep
        assert torch.equal(take_in_turn.triton(*args), take_in_turn.reference(*args))
