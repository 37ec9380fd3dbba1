# SPDX-License-Identifier: Apache-2.0
"""fastervlm against a sort."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.unit.methods.naive.fastervlm import naive
from tower_tokens import chosen as chosen_by
from tower_tokens import tower_tokens

chosen = partial(chosen_by, "fastervlm")


@pytest.mark.parametrize(("grid", "keep"), [((24, 24), [29, 64, 144, 288]), ((48, 60), [320, 1000])])
def test_smaller_budgets_keep_subsets_in_bfloat16(grid: tuple[int, int], keep: list[int]) -> None:
    """Uses the sizes of the paper."""
    last: set[int] = set()
    for number in keep:
        tokens = tower_tokens([([grid], 0)], [number], dtype=torch.bfloat16)
        (got,) = chosen(tokens)
        assert got == naive(tokens, 0) and last <= set(got)
        last = set(got)


def test_permuted_patches_are_chosen_in_permuted_order() -> None:
    """4: patches in another order are chosen in that order."""
    layout = [([(6, 6)], 0)]
    tokens = tower_tokens(layout, [10])
    attention, want = tokens.encoder_attention(-1), chosen(tokens)
    shuffle = torch.randperm(36, generator=torch.Generator().manual_seed(3))
    (other,) = chosen(tower_tokens(layout, [10], encoder_attention={-1: attention[..., shuffle]}))
    assert sorted(shuffle[other].tolist()) == want[0]


def test_nan_and_constant_attention_keep_the_first_tokens() -> None:
    """The number of kept tokens is still exact."""
    for value in (torch.nan, 0.5):
        tokens = tower_tokens([([(5, 5)], 2)], [7], encoder_attention={-1: torch.full((1, 2, 27), value)})
        assert chosen(tokens) == [[0, 1, 2, 3, 4, 5, 6]]
