# SPDX-License-Identifier: Apache-2.0
"""scope against a naive loop written from its description."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor

import tokenprune
from greedy import alone, cosine_table, image_tokens, picked
from tests.unit.methods.naive.scope import naive


def test_coverage_only_is_near_optimal() -> None:
    """With alpha=0, gains never rise, and the greedy set reaches 1 - 1/e of the optimum."""
    method = tokenprune.method("scope", alpha=0)
    for seed in range(4):
        tokens = image_tokens([10], [3], seed=seed)
        alike = cosine_table(tokens.hidden[0].double()).clamp(min=0)

        def covered(of: Any, alike: Tensor = alike) -> float:
            return float(alike[list(of)].amax(0).sum())

        (got,) = picked(method, tokens)
        assert covered(got) >= (1 - 1 / torch.e) * max(covered(of) for of in combinations(range(10), 3))
        order = naive(**alone(tokens, 0), keep=10, alpha=0)
        steps = [covered(order[: i + 1]) - (covered(order[:i]) if i else 0) for i in range(10)]
        assert all(0 <= b <= a + 1e-9 for a, b in pairwise(steps))


def test_first_pick() -> None:
    tokens = image_tokens([50], [1])
    seen = alone(tokens, 0)
    gain = cosine_table(seen["x"]).clamp(min=0).sum(1) * seen["a"]
    assert picked(tokenprune.method("scope"), tokens) == [[int(gain.argmax())]]


def test_zero_gain_picks_the_first_tokens() -> None:
    method = tokenprune.method("scope")
    same = torch.ones(1, 9, 8)
    assert picked(method, image_tokens([9], [4], hidden=same, encoder_attention={-1: torch.ones(1, 1, 9)})) == [
        [0, 1, 2, 3]
    ]
    # Tokens that are not patches have zero attention and are picked last.
    attention = torch.ones(1, 1, 6)
    attention[..., [0, 3]] = 0
    hidden = torch.eye(6, 8)[None]
    assert picked(method, image_tokens([6], [4], hidden=hidden, encoder_attention={-1: attention})) == [[1, 2, 4, 5]]
    assert picked(method, image_tokens([6], [5], hidden=hidden, encoder_attention={-1: attention})) == [[0, 1, 2, 4, 5]]
    duplicates = torch.eye(4, 8).repeat_interleave(2, 0)[None]
    attention = torch.tensor([[[1.0, 2, 3, 4, 8, 7, 6, 5]]])
    assert picked(method, image_tokens([8], [4], hidden=duplicates, encoder_attention={-1: attention})) == [
        [1, 3, 4, 6]
    ]
