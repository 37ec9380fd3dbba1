# SPDX-License-Identifier: Apache-2.0
"""fastervlm against a sort; numbers are those of the description's invariants."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.unit.methods.naive.fastervlm import naive
from tower_tokens import chosen as chosen_by
from tower_tokens import tower_tokens

chosen = partial(chosen_by, "fastervlm")


@pytest.mark.parametrize(("grid", "keep"), [((24, 24), [29, 64, 144, 288]), ((48, 60), [320, 1000])])
def test_papers_sizes_in_bfloat16_are_nested(grid: tuple[int, int], keep: list[int]) -> None:
    """2: what stays at a smaller budget stays at a larger one."""
    last: set[int] = set()
    for number in keep:
        tokens = tower_tokens([([grid], 0)], [number], dtype=torch.bfloat16)
        (got,) = chosen(tokens)
        assert got == naive(tokens, 0) and last <= set(got)
        last = set(got)


def test_another_order() -> None:
    """4: patches in another order are chosen in that order."""
    layout = [([(6, 6)], 0)]
    tokens = tower_tokens(layout, [10])
    attention, want = tokens.encoder_attention(-1), chosen(tokens)
    shuffle = torch.randperm(36, generator=torch.Generator().manual_seed(3))
    (other,) = chosen(tower_tokens(layout, [10], encoder_attention={-1: attention[..., shuffle]}))
    assert sorted(shuffle[other].tolist()) == want[0]


def test_nan_and_no_difference() -> None:
    """8: still exactly as many, the first ones."""
    for value in (torch.nan, 0.5):
        tokens = tower_tokens([([(5, 5)], 2)], [7], encoder_attention={-1: torch.full((1, 2, 27), value)})
        assert chosen(tokens) == [[0, 1, 2, 3, 4, 5, 6]]
