# SPDX-License-Identifier: Apache-2.0
"""otprune against a naive loop written from its description."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tokenprune
from greedy import alone, image_tokens, picked
from tests.unit.methods.naive.otprune import kernel_of


@pytest.mark.parametrize("width", [6, 30])  # features fewer than tokens, and more
def test_each_pick_maximizes_the_determinant(width: int) -> None:
    hidden = torch.randn(1, 10, width, generator=torch.Generator().manual_seed(width))
    kernel, picks, gains = kernel_of(hidden[0].double(), 5.0), [], []
    for _ in range(5):
        value = {i: float(torch.logdet(kernel[[*picks, i]][:, [*picks, i]])) for i in range(10) if i not in picks}
        picks.append(max(value, key=value.get))
        gains.append(max(value.values()) - sum(gains))
    assert picked(tokenprune.method("otprune", gamma=5.0), image_tokens([10], [5], hidden=hidden)) == [sorted(picks)]
    assert all(a + 1e-9 >= b >= 0 for a, b in pairwise(gains))


def test_small_gamma_and_zero_channels() -> None:
    method, tokens = tokenprune.method("otprune"), image_tokens([40], [12])
    kernel = kernel_of(alone(tokens, 0)["x"])
    top = sorted(kernel.diagonal().topk(12).indices.tolist())
    assert picked(tokenprune.method("otprune", gamma=1e-7), tokens) == [top]
    blank = tokens.hidden.clone()
    blank[..., 5] = 0
    assert picked(method, image_tokens([40], [12], hidden=blank))
    assert picked(method, image_tokens([9], [4], hidden=torch.zeros(1, 9, 8))) == [[0, 1, 2, 3]]
