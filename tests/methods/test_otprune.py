# SPDX-License-Identifier: Apache-2.0
"""otprune against a naive loop written from its description."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from greedy import alone, check_against, image_tokens, next_pick, picked
from tokenprune import OptionError


def kernel_of(x: Tensor, gamma: float = 0.01) -> Tensor:
    v = x / x.norm(dim=0).clamp(min=1e-12)
    gram = v @ v.T
    return torch.eye(len(x), dtype=torch.float64) + gamma * gram @ gram.T


def naive(x: Tensor, keep: int, kept: Any = (), slack: float = 0.0, gamma: float = 0.01, **_: Any) -> list[int]:
    """In gains beside the identity's, so that a slack is a share of what tells tokens apart."""
    kernel, picks, rows = kernel_of(x, gamma), [], []
    left = kernel.diagonal().clone()
    for _ in range(keep):
        j = next_pick(left - 1, picks, kept, slack)
        told = torch.stack([row[j] * row for row in rows]).sum(0) if rows else 0
        rows.append((kernel[j] - told) / left[j].sqrt())
        left = left - rows[-1] ** 2
        picks.append(j)
    return picks


@pytest.mark.parametrize("gamma", [0.01, 10.0])
def test_equals_the_naive_loop(gamma: float) -> None:
    given = {} if gamma == 0.01 else {"gamma": gamma}
    check_against(lambda **seen: naive(**seen, gamma=gamma), "otprune", large=not given, slack=1e-3, **given)


@pytest.mark.parametrize("width", [6, 30])  # features fewer than tokens, and more
def test_the_greedy_choice_raises_the_determinant_most(width: int) -> None:
    hidden = torch.randn(1, 10, width, generator=torch.Generator().manual_seed(width))
    kernel, picks, gains = kernel_of(hidden[0].double(), 5.0), [], []
    for _ in range(5):
        value = {i: float(torch.logdet(kernel[[*picks, i]][:, [*picks, i]])) for i in range(10) if i not in picks}
        picks.append(max(value, key=value.get))
        gains.append(max(value.values()) - sum(gains))
    assert picked(tokenprune.method("otprune", gamma=5.0), image_tokens([10], [5], hidden=hidden)) == [sorted(picks)]
    assert all(a + 1e-9 >= b >= 0 for a, b in pairwise(gains))


def test_invariance() -> None:
    method, tokens = tokenprune.method("otprune"), image_tokens([40], [12])
    (want,) = picked(method, tokens)
    features = 2.0 ** torch.randint(-3, 4, (1, 1, 32), generator=torch.Generator().manual_seed(4))
    assert picked(method, image_tokens([40], [12], hidden=tokens.hidden * features)) == [want]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    (got,) = picked(method, image_tokens([40], [12], hidden=tokens.hidden[:, order]))
    assert sorted(order[got].tolist()) == want
    for fewer in (1, 5, 11):
        assert set(picked(method, image_tokens([40], [fewer]))[0]) <= set(want)
    kernel = kernel_of(alone(tokens, 0)["x"])
    top = sorted(kernel.diagonal().topk(12).indices.tolist())
    assert picked(tokenprune.method("otprune", gamma=1e-7), tokens) == [top]
    blank = tokens.hidden.clone()
    blank[..., 5] = 0
    assert picked(method, image_tokens([40], [12], hidden=blank))
    assert picked(method, image_tokens([9], [4], hidden=torch.zeros(1, 9, 8))) == [[0, 1, 2, 3]]


def test_options() -> None:
    for wrong in (0, -1, "1", math.nan):
        with pytest.raises(OptionError, match="gamma"):
            tokenprune.method("otprune", gamma=wrong)
