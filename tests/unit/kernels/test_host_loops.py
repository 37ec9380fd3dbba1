# SPDX-License-Identifier: Apache-2.0
"""Selections on the CPU run in NumPy, and choose the same tokens as the PyTorch operations of other devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from far_device import Far, counting
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.join import destinations, join
from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import rank_in_group, take_in_turn

ROWS, TOKENS = 3, 40


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scores(seed: int, *shape: int) -> Tensor:
    """Scores with ties, NaN, infinities and both zeros."""
    values = torch.randn(*shape, TOKENS, generator=draw(seed)).round(decimals=0)
    values[..., :5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0])
    return values


def masks(seed: int) -> Tensor:
    return torch.rand(ROWS, TOKENS, generator=draw(seed)) > 0.3


def on_device(function: Callable[..., Any], *args: Any) -> list[Tensor]:
    """Return the results of the operations that run on other devices."""
    with counting():
        results = function(*(Far(arg) if isinstance(arg, Tensor) else arg for arg in args))
        return [result.cpu() for result in (results if isinstance(results, tuple) else (results,))]


def same(function: Callable[..., Any], *args: Any) -> None:
    results = function(*args)
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, on_device(function, *args), strict=True):
        assert result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("pickers", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take_in_turn(pickers: int, dtype: torch.dtype) -> None:
    for seed in range(8):
        count = torch.randint(0, TOKENS // 2, (ROWS, pickers), generator=draw(seed))
        same(take_in_turn, scores(seed, ROWS, pickers).to(dtype), masks(seed), count, int(count.max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rank_in_group(dtype: torch.dtype) -> None:
    for seed in range(8):
        group = torch.randint(0, 4, (ROWS, TOKENS), generator=draw(seed))
        counts = torch.randint(0, 3, (ROWS, TOKENS), generator=draw(seed + 1))
        score = scores(seed, ROWS).to(dtype)
        for keys in ((), (score,), (counts,), (counts > 1, score), (counts.to(torch.uint8), score)):
            same(rank_in_group, group, *keys)


@pytest.mark.parametrize("weighted", [False, True])
def test_merges(weighted: bool) -> None:
    for seed in range(8):
        keep, index = masks(seed), torch.arange(TOKENS)
        keep[:, 0] = True
        mask = keep | (torch.rand(ROWS, TOKENS, generator=draw(seed + 1)) > 0.2)
        into = torch.where(torch.rand(ROWS, TOKENS, generator=draw(seed + 2)) > 0.3, keep.int().argmax(1)[:, None], -1)
        assign, output = torch.where(keep, index, into), (keep.flatten().cumsum(0) - 1).clamp(min=0).view_as(keep)
        weight = torch.rand(ROWS, TOKENS, generator=draw(seed + 3)) if weighted else None
        arguments = (assign, mask, output, weight, int(keep.sum()))
        same(destinations, *arguments)
        own_weight, target, weights = destinations(*arguments)
        x = torch.randn(ROWS * TOKENS, 8, generator=draw(seed + 4))
        same(join, x, keep.flatten().nonzero().flatten(), own_weight, torch.arange(len(x)), target, weights)


@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_determinants(ridge: float) -> None:
    """Also with copies, of which all but the first depend on others."""
    for seed in range(8):
        x, mask = torch.randn(1, TOKENS, 24, generator=draw(seed)), torch.ones(1, TOKENS, dtype=torch.bool)
        x[:, 5:15] = x[:, 4:5]
        unit, count = normalize(x), torch.tensor([20])
        unit *= torch.rand(1, TOKENS, 1, generator=draw(seed + 1)) + 0.1
        same(lambda *args: greedy_dpp(*args, ridge), unit, unit, mask, count, 20)


def test_farthest() -> None:
    for seed in range(8):
        x, mask = torch.randn(1, TOKENS, 24, generator=draw(seed)), masks(seed)[:1]
        x[:, 5:15] = x[:, 4:5]
        same(farthest, x, mask, torch.tensor([12]), 12)
