# SPDX-License-Identifier: Apache-2.0
"""fastervlm against a sort; numbers are those of the description's invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from tokenprune.view.tokens import VisualTokens
from tower_tokens import LAYOUTS, best, budgets, kept_of, parts, tiles_of, tower_tokens


def naive(tokens: VisualTokens, image: int) -> list[int]:
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].double().mean(0).nan_to_num(nan=-torch.inf).tolist()
    numbers = parts([len(tile) for tile in tiles], tokens.keep[image])
    kept = [i for tile, number in zip(tiles, numbers, strict=True) for i in best(tile, score, number)]
    return sorted(kept + others[: tokens.keep[image] - len(kept)])


def chosen(tokens: VisualTokens, method: str = "fastervlm", **options: Any) -> list[list[int]]:
    return kept_of(tokenprune.method(method, **options).select(tokens).keep)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tiles", "thin"])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_sort(layout: Any, ties: bool) -> None:
    """1, 5: exactly the budget, and each tile by itself; 8: of equal ones the first."""
    for number, keep in enumerate(budgets(layout)):
        tokens = tower_tokens(layout, keep, seed=number, ties=ties)
        assert chosen(tokens) == [naive(tokens, image) for image in range(len(keep))]


@pytest.mark.parametrize(("grid", "keep"), [((24, 24), [29, 64, 144, 288]), ((48, 60), [320, 1000])])
def test_papers_sizes_in_bfloat16_are_nested(grid: tuple[int, int], keep: list[int]) -> None:
    """2: what stays at a smaller budget stays at a larger one."""
    last: set[int] = set()
    for number in keep:
        tokens = tower_tokens([([grid], 0)], [number], dtype=torch.bfloat16)
        (got,) = chosen(tokens)
        assert got == naive(tokens, 0) and last <= set(got)
        last = set(got)


def test_what_does_not_change_the_choice() -> None:
    """3, 4: a scale, the order of heads, hidden states; patches in another order are chosen in that order."""
    layout = [([(6, 6)], 0)]
    tokens = tower_tokens(layout, [10])
    attention, want = tokens.encoder_attention(-1), chosen(tokens)
    shuffle = torch.randperm(36, generator=torch.Generator().manual_seed(3))
    for given in ({-1: attention * 1e-3}, {-1: attention.flip(1)}):
        assert chosen(tower_tokens(layout, [10], encoder_attention=given)) == want
    assert chosen(tower_tokens(layout, [10], hidden=torch.zeros(1, 36, 3))) == want
    (other,) = chosen(tower_tokens(layout, [10], encoder_attention={-1: attention[..., shuffle]}))
    assert sorted(shuffle[other].tolist()) == want[0]


def test_nan_and_no_difference() -> None:
    """8: still exactly as many, the first ones."""
    for value in (torch.nan, 0.5):
        tokens = tower_tokens([([(5, 5)], 2)], [7], encoder_attention={-1: torch.full((1, 2, 27), value)})
        assert chosen(tokens) == [[0, 1, 2, 3, 4, 5, 6]]
