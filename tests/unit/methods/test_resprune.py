# SPDX-License-Identifier: Apache-2.0
"""resprune: behavior that its naive loop (naive/resprune.py) does not cover."""

from __future__ import annotations

import torch

import tokenprune
from greedy import image_tokens, picked


def test_copies_come_last_and_alpha_0_ignores_the_text() -> None:
    tokens = image_tokens([20], [10])
    x = tokens.hidden.clone()
    x[0, 10:] = x[0, :10]
    words = tokens.text.hidden
    for options in ({}, {"alpha": 0}, {"unit": True}):
        (got,) = picked(tokenprune.method("resprune", **options), image_tokens([20], [10], hidden=x))
        assert sorted(i % 10 for i in got) == list(range(10))
    method = tokenprune.method("resprune", alpha=0)
    other = image_tokens([20], [10], text={"hidden": words.flip(2)})
    assert picked(method, other) == picked(method, tokens) and method.prefix_cache_safe
    assert picked(tokenprune.method("resprune"), other) != picked(tokenprune.method("resprune"), tokens)


def test_extreme_norms_and_nonfinite_tokens() -> None:
    """Very long, very short, zero and NaN tokens: the count is exact, and NaN tokens are never kept."""
    tokens = image_tokens([20], [10])
    (want,) = picked(tokenprune.method("resprune"), tokens)
    for factor in (2.0**40, 2.0**-40):
        assert picked(tokenprune.method("resprune"), image_tokens([20], [10], hidden=tokens.hidden * factor)) == [want]
    picked(tokenprune.method("resprune"), image_tokens([20], [10], hidden=tokens.hidden * 0))
    x = tokens.hidden.clone()
    x[0, want[0]] = torch.nan
    assert want[0] not in picked(tokenprune.method("resprune"), image_tokens([20], [10], hidden=x))[0]
