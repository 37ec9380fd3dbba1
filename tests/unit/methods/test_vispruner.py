# SPDX-License-Identifier: Apache-2.0
"""vispruner against a naive loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import tokenprune
from tests.unit.methods.naive.vispruner import naive
from tokenprune.methods.pre_llm import vispruner
from tower_tokens import best, kept_of, tower_tokens
from tower_tokens import chosen as chosen_by

chosen = partial(chosen_by, "vispruner")


@pytest.mark.parametrize("count", [2, 9, 17, 24])
def test_every_budget_is_exact(count: int) -> None:
    """Also where the authors' code fails. important=1 equals fastervlm."""
    for keep in range(1, count + 1):
        tokens = tower_tokens([([(1, count)], 0)], [keep])
        assert chosen(tokens) == [naive(tokens, 0)] and len(chosen(tokens)[0]) == keep
        fastervlm = kept_of(tokenprune.method("fastervlm").select(tokens).keep)
        assert chosen(tokens, important=1.0) == fastervlm


def test_long_lines_are_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [([(6, 5), (4, 7)], 1), ([(5, 5)], 0)]
    whole = chosen(tower_tokens(layout, [20, 9]))
    monkeypatch.setattr("tokenprune.kernels.clusters._AT_ONCE", 1)
    assert chosen(tower_tokens(layout, [20, 9])) == whole


@pytest.mark.parametrize("few", [1, 32])
def test_long_line_equals_table(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens include copies, whose near neighbors are all dropped."""
    layout = [([(18, 15), (16, 17)], 1), ([(25, 21)], 0)]
    given = tower_tokens(layout, [60, 90])
    x = given.encoder_features.clone()
    x[:, 1::5] = x[:, :-1:5][:, : x[:, 1::5].shape[1]]
    tokens = tower_tokens(layout, [60, 90], encoder_features=x)
    whole = chosen(tokens)
    monkeypatch.setattr("tokenprune.kernels.farthest.TABLE", 0)
    monkeypatch.setattr(vispruner, "_NUM_NEIGHBORS", few)
    monkeypatch.setattr(vispruner, "_ROWS_AT_ONCE", 50)
    monkeypatch.setattr(vispruner, "_run_rounds", None)
    assert chosen(tokens) == whole


def test_features_of_important_tokens_have_no_effect() -> None:
    layout = [([(6, 6)], 0)]
    tokens = tower_tokens(layout, [12])
    x, attention, want = tokens.encoder_features, tokens.encoder_attention(-1), chosen(tokens)
    first = best(list(range(36)), attention[0].mean(0).tolist(), 6)
    other = x.index_fill(1, torch.tensor(first), 7.0)
    assert chosen(tower_tokens(layout, [12], encoder_features=other)) == want


def test_duplicate_is_dropped_first() -> None:
    """It is at an odd rank, and its copy at an even rank."""
    scores = torch.linspace(1, 0, 16)[None, None]
    x = torch.eye(16)[None].clone()
    x[0, 6] = x[0, 3]
    tokens = tower_tokens([([(4, 4)], 0)], [15], encoder_attention={-1: scores}, encoder_features=x)
    assert chosen(tokens, important=0.0) == [[i for i in range(16) if i != 6]]
    x[0, 0] = 0  # zero vectors are similar to no token
    tokens = tower_tokens([([(4, 4)], 0)], [14], encoder_attention={-1: scores}, encoder_features=x)
    assert len(chosen(tokens, important=0.0)[0]) == 14
