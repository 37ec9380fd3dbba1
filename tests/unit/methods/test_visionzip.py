# SPDX-License-Identifier: Apache-2.0
"""visionzip against a naive loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from tests.unit.methods.naive.visionzip import naive
from tokenprune import Selection
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import merged, tower_tokens


def select(tokens: VisualTokens, **options: Any) -> Selection:
    return tokenprune.method("visionzip", **options).select(tokens)


@pytest.mark.parametrize(("grid", "keep", "context"), [((24, 24), 64, 10), ((24, 24), 192, 30), ((48, 60), 320, 50)])
def test_number_of_contextual_tokens_equals_the_paper(grid: tuple[int, int], keep: int, context: int) -> None:
    targets = select(tower_tokens([([grid], 0)], [keep])).assign[0].tolist()
    assert len({target for i, target in enumerate(targets) if target not in (i, -1)}) == context


def test_contextual_token_averages_target_and_mean() -> None:
    """Dominant tokens and targets without members are unchanged, and all tokens if none are dropped."""
    tokens = tower_tokens([([(8, 8)], 0)], [24])
    dominant, contextual, targets = naive(tokens, 0)
    for options, weigh in (
        ({}, lambda x, members: (x + members.mean(0)) / 2),
        ({"centre": 0.8}, lambda x, members: 0.8 * x + 0.2 * members.mean(0)),
        ({"centre": None}, lambda x, members: torch.cat([x[None], members]).mean(0)),
    ):
        out = merged(tokens, select(tokens, **options))[0]
        for target in contextual:
            members = [i for i, j in targets.items() if j == target]
            want = weigh(tokens.hidden[0, target], tokens.hidden[0, members]) if members else tokens.hidden[0, target]
            torch.testing.assert_close(out[target], want)
        assert torch.equal(out[dominant], tokens.hidden[0, dominant])
    tokens_kept = tower_tokens([([(8, 8)], 0)], [64])
    assert torch.equal(merged(tokens_kept, select(tokens_kept)), tokens_kept.hidden)
