# SPDX-License-Identifier: Apache-2.0
"""NumPy selections on the CPU keep the same tokens as the PyTorch operations of other devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from far_device import Far, counting
from tokenprune.kernels.clusters import assign_to_centres
from tokenprune.kernels.compact import partition
from tokenprune.kernels.density import density_peaks
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.farthest import farthest
from tokenprune.kernels.join import destinations, join, merge_assigned
from tokenprune.kernels.match import TIE, _find_row_maxima, best_match, match_selected
from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import rank_in_group, take_in_turn
from tokenprune.selection.apply import _check_assign
from tokenprune.selection.method import Selection

ROWS, TOKENS = 3, 40


def make_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_scores(seed: int, *shape: int) -> Tensor:
    """Draw scores with ties, NaN, infinities and both zeros."""
    values = torch.randn(*shape, TOKENS, generator=make_generator(seed)).round(decimals=0)
    values[..., :5] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0])
    return values


def make_masks(seed: int) -> Tensor:
    return torch.rand(ROWS, TOKENS, generator=make_generator(seed)) > 0.3


def run_on_device(function: Callable[..., Any], *args: Any) -> list[Tensor]:
    """Return the results of the operations that run on other devices."""
    with counting():
        function = move_keywords(function)
        results = function(*(Far(arg) if isinstance(arg, Tensor) else arg for arg in args))
        return [result.cpu() for result in (results if isinstance(results, tuple) else (results,))]


def move_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(function, partial):
        return function
    keywords = {name: Far(value) if isinstance(value, Tensor) else value for name, value in function.keywords.items()}
    return partial(function.func, **keywords)


def check_same(function: Callable[..., Any], *args: Any) -> None:
    results = function(*args)
    results = results if isinstance(results, tuple) else (results,)
    for result, expected in zip(results, run_on_device(function, *args), strict=True):
        assert result.dtype == expected.dtype and torch.equal(result, expected)


@pytest.mark.parametrize("pickers", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take_in_turn(pickers: int, dtype: torch.dtype) -> None:
    for seed in range(8):
        count = torch.randint(0, TOKENS // 2, (ROWS, pickers), generator=make_generator(seed))
        check_same(take_in_turn, make_scores(seed, ROWS, pickers).to(dtype), make_masks(seed), count, int(count.max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rank_in_group(dtype: torch.dtype) -> None:
    for seed in range(8):
        group = torch.randint(0, 4, (ROWS, TOKENS), generator=make_generator(seed))
        counts = torch.randint(0, 3, (ROWS, TOKENS), generator=make_generator(seed + 1))
        score = make_scores(seed, ROWS).to(dtype)
        for keys in ((), (score,), (counts,), (counts > 1, score), (counts.to(torch.uint8), score)):
            check_same(rank_in_group, group, *keys)


@pytest.mark.parametrize("weighted", [False, True])
def test_merges(weighted: bool) -> None:
    for seed in range(8):
        keep, index = make_masks(seed), torch.arange(TOKENS)
        keep[:, 0] = True
        mask = keep | (torch.rand(ROWS, TOKENS, generator=make_generator(seed + 1)) > 0.2)
        target_index = torch.where(
            torch.rand(ROWS, TOKENS, generator=make_generator(seed + 2)) > 0.3, keep.int().argmax(1)[:, None], -1
        )
        assign, output = (
            torch.where(keep, index, target_index),
            (keep.flatten().cumsum(0) - 1).clamp(min=0).view_as(keep),
        )
        weight = torch.rand(ROWS, TOKENS, generator=make_generator(seed + 3)) if weighted else None
        arguments = (assign, mask, output, weight, int(keep.sum()))
        check_same(destinations, *arguments)
        own_weight, target, weights = destinations(*arguments)
        x = torch.randn(ROWS * TOKENS, 8, generator=make_generator(seed + 4))
        check_same(join, x, keep.flatten().nonzero().flatten(), own_weight, torch.arange(len(x)), target, weights)
        index = torch.arange(len(x)).view_as(keep)
        check_same(merge_assigned, x.double() if seed % 2 else x, assign, mask, index, weight)
        own_weight, target, weights = destinations(assign, mask, index, weight, len(x))
        expected = join(x, None, own_weight, index.flatten(), target, weights)
        assert torch.equal(merge_assigned(x, assign, mask, index, weight), expected)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_match_of_selected_tokens_is_the_best_match(grouped: bool) -> None:
    for seed in range(8):
        x, selected = torch.randn(ROWS, TOKENS, 6, generator=make_generator(seed)), make_masks(seed)
        selected[0, :2] = True
        x[0, 5] = math.nan if seed % 4 == 1 else x[0, 4]
        group = torch.randint(0, 3, (ROWS, TOKENS), generator=make_generator(seed + 1)) if grouped else None
        count = int(selected.sum(1).max())
        match = match_selected(x, selected, count, group)
        for row in range(ROWS):
            index = selected[row].nonzero().flatten()
            if len(index):
                groups = {} if group is None else {"group_a": group[row, None], "group_b": group[row, None, index]}
                expected = index[best_match(x[row, None], x[row, None, index], **groups)[1][0]]
                assert torch.equal(match[row], expected)
        check_same(match_selected, x, selected, count, group)


def test_merges_without_weight() -> None:
    """Targets of total weight 0 are copied; without merges all tokens are copied."""
    x, keep, source = torch.randn(6, 4, generator=make_generator(0)), torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4])
    for target in ([0, 0, 1], [3, 3, 3], [1, 3, 1]):
        for own_weight in ([0.0, 1.0, 0.0], [0.0, 0.0, 0.0]):
            check_same(
                join, x, keep, torch.tensor(own_weight), source, torch.tensor(target), torch.tensor([0.0, 0.0, 0.5])
            )
    check_same(join, x, None, torch.ones(6), source, torch.tensor([0, 2, 2]), torch.ones(3))


def test_partition() -> None:
    for seed in range(8):
        check_same(partition, make_masks(seed))


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("unusable", ["", "padding", "infinite"])
def test_density_peaks(unusable: str, capped: bool) -> None:
    for seed in range(8):
        x, mask = (
            torch.randn(ROWS, TOKENS, 4, generator=make_generator(seed)),
            torch.ones(ROWS, TOKENS, dtype=torch.bool),
        )
        x[:, 5:15] = x[:, 4:5]
        mask = make_masks(seed) if unusable == "padding" else mask
        x[0, 3, 1] = math.inf if unusable == "infinite" else 0
        count = torch.tensor([1, 5, 9])
        check_same(density_peaks, x, mask, count, 7, 9, capped)
        check_same(assign_to_centres, x, mask, density_peaks(x, mask, count, 7, 9, capped), 9)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("with_nan", [False, True])
def test_best_match(with_nan: bool, groups: int) -> None:
    for seed in range(8):
        x, y = (torch.randn(ROWS, TOKENS, 8, generator=make_generator(seed + index)) for index in range(2))
        y[:, 5:15] = y[:, 4:5]
        x[0, 3, 1] = math.nan if with_nan else 0
        group_x, group_y = (
            torch.randint(0, groups, (ROWS, TOKENS), generator=make_generator(index)) for index in range(2)
        )
        for allowed in (None, make_masks(seed)):
            check_same(partial(best_match, group_a=group_x, group_b=group_y), x, y, allowed)
        check_same(partial(best_match, exclude_self=True), y, y)


def test_first_max() -> None:
    """The first value within `TIE` of the maximum counts, also if a later value is larger."""
    x = torch.randn(ROWS, TOKENS, 50, generator=make_generator(0)).round(decimals=0)
    check_same(_find_row_maxima, x + TIE / 2 * torch.rand(x.shape, generator=make_generator(1)))


def test_assignments() -> None:
    """An entry is valid if it is -1, the index of a kept token, or padding."""
    results = []
    for seed in range(40):
        keep = make_masks(seed) & make_masks(seed + 1)
        assign = torch.where(
            keep, torch.arange(TOKENS), torch.randint(-1, 2, keep.shape, generator=make_generator(seed)) - 1
        )
        assign[0, 7], mask = (-1, -2, TOKENS, 5)[seed % 4], make_masks(seed + 2)
        keep[:, 0] = True
        assign.clamp_(min=-1 if seed % 4 != 1 else -2)

        def check(keep: Tensor, assign: Tensor, mask: Tensor) -> Tensor:
            segments = SimpleNamespace(mask=mask, has_padding=True)
            return torch.as_tensor(_check_assign(Selection(keep, assign), segments, SimpleNamespace(name="method"))[1])

        check_same(check, keep, assign, mask)
        results.append(bool(check(keep, assign, mask)))
    assert 5 < sum(results) < 35


@pytest.mark.parametrize("ridge", [0.0, 1.0])
def test_determinants(ridge: float) -> None:
    """Also with copies, which depend on the first copy."""
    for seed in range(8):
        x, mask = torch.randn(1, TOKENS, 24, generator=make_generator(seed)), torch.ones(1, TOKENS, dtype=torch.bool)
        x[:, 5:15] = x[:, 4:5]
        unit, count = normalize(x), torch.tensor([20])
        unit *= torch.rand(1, TOKENS, 1, generator=make_generator(seed + 1)) + 0.1
        check_same(lambda *args: greedy_dpp(*args, ridge), unit, unit, mask, count, 20)


def test_farthest() -> None:
    for seed in range(8):
        x, mask = torch.randn(1, TOKENS, 24, generator=make_generator(seed)), make_masks(seed)[:1]
        x[:, 5:15] = x[:, 4:5]
        check_same(farthest, x, mask, torch.tensor([12]), 12)
