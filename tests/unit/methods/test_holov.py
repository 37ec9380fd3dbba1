# SPDX-License-Identifier: Apache-2.0
"""holov against a naive loop."""

from __future__ import annotations

from functools import partial

import torch

from tower_tokens import chosen as chosen_by
from tower_tokens import tower_tokens

chosen = partial(chosen_by, "holov")


def test_features_change_the_holistic_rank() -> None:
    """They do not change the budgets of strips."""
    layout = [([(8, 8)], 0)]
    tokens = tower_tokens(layout, [16])
    other = tower_tokens(layout, [16], hidden=torch.randn(1, 64, 16))
    assert chosen(other, rank="holistic") != chosen(tokens, rank="holistic")
    parts = [[sum(i // 16 == c for i in got[0]) for c in range(4)] for got in (
        chosen(other, rank="holistic", crops=4), chosen(tokens, crops=4)
    )]  # fmt: skip
    assert parts[0] == parts[1]


def test_full_strip_and_constant_attention() -> None:
    """A full strip passes its budget to others. With constant attention, budgets differ by at most one."""
    scores = torch.full((1, 1, 64), 1e-6)
    scores[..., 16:32] = 1
    (got,) = chosen(tower_tokens([([(8, 8)], 0)], [40], encoder_attention={-1: scores}), crops=4)
    assert set(range(16, 32)) <= set(got) and len(got) == 40
    assert [sum(i // 16 == c for i in got) for c in range(4)] == [8, 16, 8, 8]
    for value in (0.25, 0.0, torch.nan):
        even = {-1: torch.full((1, 1, 64), value)}
        (got,) = chosen(tower_tokens([([(8, 8)], 0)], [30], encoder_attention=even), crops=4)
        assert [sum(i // 16 == c for i in got) for c in range(4)] == [8, 8, 7, 7]
