# SPDX-License-Identifier: Apache-2.0
"""Kernels that merge and move tokens equal their references, and the references equal plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.join import join

HALVES_TOO = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def draw_join(n: int, m: int, r: int, d: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """Draw arguments of `join` with shared targets, tokens without a target and zero weights."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g).to(dtype)
    keep, source = torch.randperm(n, generator=g)[:m], torch.randint(n, (r,), generator=g)
    target = torch.where(torch.rand(r, generator=g) < 0.2, m, torch.randint(max(1, m // 3), (r,), generator=g))
    own_weight, weight = (torch.randint(0, 3, (k,), generator=g).float() for k in (m, r))
    return x, keep, own_weight, source, target, weight


@HALVES_TOO
@pytest.mark.parametrize(("n", "m", "r", "d"), [(1, 1, 0, 3), (1, 1, 2, 1), (13, 7, 6, 9), (9, 9, 20, 20)])
def test_join(kernel_device: torch.device, dtype: torch.dtype, n: int, m: int, r: int, d: int) -> None:
    x, keep, own_weight, source, target, weight = draw_join(n, m, r, d, dtype)
    keep = None if n == m else keep
    want = torch.empty(m, d, dtype=dtype)
    for row in range(m):
        kept = x[row] if keep is None else x[keep[row]]
        members = [j for j in range(r) if target[j] == row]
        total = own_weight[row] + sum(weight[j] for j in members)
        mass = kept.float() * own_weight[row]
        for j in members:
            mass = mass + x[source[j]].float() * weight[j]
        want[row] = (mass / total).to(dtype) if members and total > 0 else kept
    arguments = (x, keep, own_weight, source, target, weight)
    assert torch.equal(join.reference(*arguments), want)
    arguments = [None if t is None else t.to(kernel_device) for t in arguments]
    # A GPU fuses multiplication and addition, with a single rounding.
    torch.testing.assert_close(join.triton(*arguments, block=16).cpu(), want)


def test_join_copies_tokens_without_sources_and_has_gradients() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    keep, own_weight = torch.tensor([3, 0]), torch.tensor([2.0, 0.3], dtype=torch.float64)
    source, target = torch.tensor([1, 2, 1]), torch.tensor([0, 0, 2])
    weight = torch.tensor([1.0, 1.0, 5.0], dtype=torch.float64)
    assert torch.equal(join(x, keep, own_weight, source, target, weight)[1], x[0])
    assert torch.autograd.gradcheck(lambda x: join(x, keep, own_weight, source, target, weight), x)
    with torch.no_grad():
        x[2] = torch.nan
        assert join(x, keep, own_weight, source, target, weight).isnan().any(1).tolist() == [True, False]


def test_join_copies_tokens_of_zero_weight(kernel_device: torch.device) -> None:
    x, zero = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([0.0])
    arguments = [t.to(kernel_device) for t in (x, torch.tensor([1]), zero, torch.tensor([0]), torch.tensor([0]), zero)]
    for implementation in (join.reference, join.triton):
        assert implementation(*arguments).tolist() == [[3.0, 5.0]]


@pytest.mark.parametrize(("b", "w"), [(1, 1), (2, 16), (2, 35), (1, 0)])
def test_partition(kernel_device: torch.device, b: int, w: int) -> None:
    g = torch.Generator().manual_seed(0)
    for share in (0.0, 0.4, 1.0):
        first = torch.rand(b, w, generator=g) < share
        want = [sorted(range(w), key=lambda i: not row[i]) for row in first.tolist()]  # a stable sort
        assert partition.reference(first).tolist() == want
        assert partition.triton(first.to(kernel_device), block=16).tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.long, torch.bool], ids=str)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2, 7, 9), 1),  # hidden states
        ((1, 7, 4), -2),  # cos and sin, one row for the whole batch
        ((3, 2, 7, 4), -2),  # M-RoPE
        ((3, 1, 7), -1), ((2, 7), 1),  # position ids
        ((2, 0, 7, 3), 2), ((1, 7, 0), 1),
    ],
)  # fmt: skip
def test_gather_tokens(kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    x = torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    dim = dim % len(shape)
    for rows in {2, shape[dim - 1] or 2}:
        if shape[dim - 1] not in (1, rows):
            continue
        index = torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(1))
        batches = x.expand(*shape[: dim - 1], rows, *shape[dim:])
        want = torch.stack([batches.select(dim - 1, b).index_select(dim - 1, index[b]) for b in range(rows)], dim - 1)
        assert torch.equal(gather_tokens.reference(x, index, dim), want)
        assert torch.equal(gather_tokens.reference(batches, index, dim), want)  # not contiguous
        on_device = [t.to(kernel_device) for t in (batches, index)]
        assert torch.equal(gather_tokens.triton(*on_device, dim, block=8).cpu(), want)
        assert torch.equal(gather_tokens.triton(x.to(kernel_device), on_device[1], dim).cpu(), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="real shapes need a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_shapes(dtype: torch.dtype) -> None:
    arguments = [t.cuda() for t in draw_join(2880, 2000, 3000, 4096, dtype)]
    assert torch.equal(join.triton(*arguments), join.triton(*arguments))
    torch.testing.assert_close(join.triton(*arguments), join.reference(*arguments))
    first = (torch.rand(4, 32768) < 0.1).cuda()
    order = partition.triton(first)
    assert torch.equal(order, partition.reference(first))
    x = torch.randn(4, 32768, 128, device="cuda", dtype=dtype)
    assert torch.equal(gather_tokens.triton(x, order[:, :3000], 1), gather_tokens.reference(x, order[:, :3000], 1))
