# SPDX-License-Identifier: Apache-2.0
"""tops (stage I), idselection and agilepruner: ties, limits and the effective rank."""

from __future__ import annotations

import pytest
import torch

import tokenprune
from greedy import image_tokens, picked
from tokenprune.methods.pre_llm.agilepruner import compute_effective_rank


@pytest.mark.parametrize("name", ["tops", "idselection", "agilepruner"])
def test_duplicates_come_last(name: str) -> None:
    """A copy of a pick comes after distinct tokens. An image of one color without attention raises no error."""
    method = tokenprune.method(name)
    copies = torch.eye(4, 8).repeat_interleave(3, 0)[None]
    attention = torch.tensor([[[9.0, 9, 9, 7, 7, 7, 5, 5, 5, 3, 3, 3]]])
    assert picked(method, image_tokens([12], [3], hidden=copies, encoder_attention={-1: attention})) == [[0, 3, 6]]
    same = {"hidden": torch.full((1, 9, 8), 0.3), "encoder_attention": {-1: torch.zeros(1, 1, 9)}}
    assert picked(method, image_tokens([9], [4], **same)) == [[0, 1, 2, 3]]


def test_limits_with_attention_only() -> None:
    tokens = image_tokens([60], [20])
    top = [sorted(tokens.encoder_attention(-1)[0].mean(0).topk(20).indices.tolist())]
    assert picked(tokenprune.method("tops", diversity=0, coverage=0), tokens) == top
    assert picked(tokenprune.method("agilepruner", average_rank=2.0, limit=0), tokens) == top
    assert picked(tokenprune.method("idselection", gamma=1e6), tokens) == top
    (few,), (many,) = (picked(tokenprune.method("agilepruner", average_rank=r), tokens) for r in (5.0, 2000.0))
    assert len(set(few) & set(top[0])) < len(set(many) & set(top[0]))


def test_effective_rank() -> None:
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert float(compute_effective_rank(torch.eye(6, 9)[None], mask)) == pytest.approx(6)
    assert float(compute_effective_rank(torch.ones(1, 6, 9), mask)) == pytest.approx(1, abs=1e-4)
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    masks = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    for scale in (1, 100):
        got = compute_effective_rank(x * scale, masks)
        for row, count in enumerate((6, 4)):
            share = torch.linalg.svdvals(x[row, :count].double())
            share = share / share.sum()
            assert float(got[row]) == pytest.approx(float((-(share * share.log()).sum()).exp()), rel=1e-4)
    assert torch.isfinite(compute_effective_rank(torch.zeros(1, 6, 3), mask)).all()
