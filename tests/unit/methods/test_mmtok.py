# SPDX-License-Identifier: Apache-2.0
"""mmtok against a naive loop written from its description."""

from __future__ import annotations

import math

import pytest
import torch

import tokenprune
from greedy import alone, image_tokens, picked
from tests.unit.methods.naive.mmtok import naive, table
from tokenprune.kernels.pairs import Products
from tokenprune.methods.pre_llm.mmtok import build_softmax_relation


def test_without_the_question() -> None:
    tokens = image_tokens([50], [9])
    seen = alone(tokens, 0) | {"t": torch.zeros(0, 32, dtype=torch.float64)}
    want = [sorted(naive(**seen, keep=9))]
    method = tokenprune.method("mmtok", question=False)
    assert picked(method, tokens) == want and not method.query_aware and method.prefix_cache_safe
    silent = {"hidden": torch.randn(1, 3, 32), "mask": torch.zeros(1, 3, dtype=torch.bool)}
    assert picked(tokenprune.method("mmtok"), image_tokens([50], [9], text=silent)) == want
    assert picked(tokenprune.method("mmtok", alpha=1e6), tokens) == want != picked(tokenprune.method("mmtok"), tokens)


def test_with_text_only_each_pick_covers_one_more_word() -> None:
    tokens = image_tokens([50], [4])
    words = alone(tokens, 0)["t"]
    (got,) = picked(tokenprune.method("mmtok", alpha=0), tokens)
    best = table(**{k: v for k, v in alone(tokens, 0).items() if k != "a"}, alpha=0)[: len(words)].argmax(1).tolist()
    assert len(set(best)) >= 4 and set(got) <= set(best)


def test_rows_sum_to_their_weight_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a table, and row by row."""
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 3, generator=g), torch.randn(2, 6, 3, generator=g)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    rows = torch.arange(5) < torch.tensor([[2], [5]])
    want = (a @ b.transpose(1, 2) / 0.3).masked_fill(~mask[:, None], -math.inf).softmax(2)
    want = want.masked_fill(~rows[:, :, None], 0) * 0.7 / rows.sum(1)[:, None, None]
    for fits in (True, False):
        monkeypatch.setattr(Products, "fits_in_memory", fits)
        got = build_softmax_relation(Products(a, b), 0.3, 0.7, mask, rows)
        for segment, count in enumerate((6, 4)):
            found = got.rows(segment, torch.arange(5))
            assert torch.allclose(found[:, :count], want[segment, :, :count], atol=1e-6)
            assert not found[~rows[segment]].any()
            for place in range(count):
                assert torch.allclose(got.column(segment, place), found[:, place])
