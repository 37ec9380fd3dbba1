# SPDX-License-Identifier: Apache-2.0
"""prumerge and prumerge_plus against naive loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from tests.unit.methods.naive.prumerge import BOTH, naive
from tokenprune import Selection
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import LAYOUTS, kept_of, merged, tower_tokens


def select(name: str, tokens: VisualTokens, **options: Any) -> Selection:
    return tokenprune.method(name, **options).select(tokens)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("merge", ["rest", "none"])
def test_adaptive_count_equals_the_authors(name: str, merge: str) -> None:
    """Outliers by numpy's quantiles per tile: no outliers, a few, and more than a third of the tokens."""
    layout = [([(8, 8), (5, 4)], 2), ([(12, 12)], 0)]
    for power in (1, 4, 16):
        tokens = tower_tokens(layout, [20, 40], heads=1)
        tokens = tower_tokens(layout, [20, 40], encoder_attention={-1: tokens.encoder_attention(-1) ** power})
        selection = select(name, tokens, merge=merge, exact=False)
        want = [naive(tokens, image, name, merge, exact=False) for image in range(2)]
        assert kept_of(selection.keep) == [kept for kept, _ in want] and selection.counts is None
    for attention in (torch.full((1, 1, 64), 0.5), (torch.arange(64) % 5 == 0).float()[None, None]):
        tokens = tower_tokens([([(8, 8)], 0)], [9], encoder_attention={-1: attention})
        kept, _ = naive(tokens, 0, name, merge, exact=False)
        assert kept_of(select(name, tokens, merge=merge, exact=False).keep) == [kept] and kept
        assert len(kept) == 1 or bool(attention.max() == 1)
    tokens_kept = tower_tokens([([(8, 8)], 0)], [64])
    assert select(name, tokens_kept, exact=False).keep.all()  # no token is dropped


def test_rest_token_is_the_attention_mean_of_all_others() -> None:
    """Other kept tokens are unchanged. Without attention, all tokens are unchanged."""
    tokens = tower_tokens([([(8, 8)], 0)], [9])
    selection = select("prumerge", tokens)
    kept, targets = naive(tokens, 0, "prumerge")
    (slot,) = set(targets.values())
    rest, weight = [*targets, slot], tokens.encoder_attention(-1)[0].mean(0)
    out = merged(tokens, selection)[0]
    torch.testing.assert_close(out[slot], (tokens.hidden[0, rest] * weight[rest, None]).sum(0) / weight[rest].sum())
    others = [i for i in kept if i != slot]
    assert torch.equal(out[others], tokens.hidden[0, others])
    no_attention = tower_tokens([([(8, 8)], 0)], [9], encoder_attention={-1: torch.zeros(1, 1, 64)})
    assert torch.equal(merged(no_attention, select("prumerge", no_attention)), no_attention.hidden)


def test_clusters_are_attention_weighted_means() -> None:
    tokens = tower_tokens([([(8, 8)], 0)], [9])
    kept, targets = naive(tokens, 0, "", "clusters")
    out = merged(tokens, select("prumerge", tokens, merge="clusters"))[0]
    weight = tokens.encoder_attention(-1)[0].mean(0)
    for target in kept:
        group = [target, *(i for i, j in targets.items() if j == target)]
        want = (tokens.hidden[0, group] * weight[group, None]).sum(0) / weight[group].sum()
        torch.testing.assert_close(out[target], want)


def test_many_kept_tokens_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tower_tokens(LAYOUTS[1], [30, 9])
    expected = select("prumerge", tokens, merge="clusters").assign
    monkeypatch.setattr("tokenprune.kernels.clusters._MAX_ELEMENTS", 3 * tokens.mask.numel())
    assert torch.equal(select("prumerge", tokens, merge="clusters").assign, expected)
