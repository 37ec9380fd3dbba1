# SPDX-License-Identifier: Apache-2.0
"""entropyprune against a naive loop, on synthetic tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from several_cuts import COUNTS, SHARES, best, counts_of, rows, view, wanted
from tokenprune import Budget
from tokenprune.methods.in_llm import entropyprune
from tokenprune.methods.in_llm.entropyprune import compute_entropies

OBSERVED = {"queries": "query_heads", "keys": "key_heads", "values": "value_heads"}


def naive(heads: Tensor, normalise: bool = False) -> float:
    """Return the entropy of one token's heads, shape (heads, channels), from singular values."""
    num_heads = len(heads)
    centred = heads.double() - sum(heads.double()) / num_heads
    values = [max(1e-10, float(value) ** 2 / num_heads) for value in torch.linalg.svdvals(centred)]
    if normalise:
        values = [value / sum(values) for value in values]
    return -sum(value * math.log(value) for value in values) / math.log(num_heads)


@each("states", list(OBSERVED))
@each("normalise", [False, True])
def test_matches_loop(states: Any, normalise: bool) -> None:
    method = tokenprune.method("entropyprune", states=states, normalise=normalise)
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            keep = wanted(counts, share)
            tokens = view(counts, keep, method.needs, seed=seed)
            heads = getattr(tokens, OBSERVED[states])
            want = [
                best([naive(token_heads, normalise) for token_heads in heads[row, :n]], k)
                for row, (n, k) in enumerate(zip(counts, keep, strict=True))
            ]
            assert rows(method.select(tokens).keep) == want


def test_equal_heads_have_lowest_entropy() -> None:
    """Also with more heads than channels, a single head, and a token that is not finite."""
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0)) / 8
    x[1] = x[1, :1]
    assert compute_entropies(x).argmin() == 1
    assert compute_entropies(x)[1] == pytest.approx(6e-10 * math.log(1e10) / math.log(6))
    wide = x.transpose(1, 2)
    want = torch.tensor([naive(token_heads) for token_heads in wide], dtype=torch.float64)
    torch.testing.assert_close(compute_entropies(wide), want)
    assert compute_entropies(x[:, :1]).isfinite().all()
    x[2] = torch.inf
    assert compute_entropies(x).isnan().tolist() == [False, False, True, False]


def test_chunked_computation_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = view([30, 31], [9, 9], ("query_heads",))
    want = tokenprune.method("entropyprune").score(tokens)
    monkeypatch.setattr(entropyprune, "_MAX_ELEMENTS", 100)
    assert torch.equal(tokenprune.method("entropyprune").score(tokens), want)


@each(("average", "count"), [(192, 166), (128, 98), (64, 29)])
def test_matches_authors_counts(average: int, count: int) -> None:
    """The authors keep int((L a - K N) / (L - K)) of 576 tokens in 32 layers."""
    ((layer, got),) = counts_of(tokenprune.method("entropyprune"), 32, 576, Budget(average_tokens=average))
    assert layer == 2 and 0 <= got - count <= 1
