# SPDX-License-Identifier: Apache-2.0
"""pact against a naive loop. Numbers in docstrings are invariants of its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from each import each
from several_cuts import COUNTS, SHARES, counts_of, view, wanted
from tests.unit.methods.naive.pact import centres as naive_centres
from tests.unit.methods.naive.pact import naive
from tokenprune import Selection, VisualTokens
from tokenprune.kernels import farthest, pairs
from tokenprune.methods.in_llm.pact import select_in_rounds
from tokenprune.testing import visual_tokens
from tower_tokens import merged

NEEDS = ("keys", "mean_query_attention", "previous_hidden")


def select(tokens: VisualTokens, **options: Any) -> Selection:
    return tokenprune.method("pact", layer=2, **options).select(tokens)


def list_groups(selection: Selection, row: int, count: int) -> tuple[list[int], dict[int, int]]:
    """Return the kept tokens, and the target of each other token."""
    kept = selection.keep[row].nonzero().flatten().tolist()
    assign = selection.assign[row, :count].tolist()
    return kept, {i: target for i, target in enumerate(assign) if target >= 0 and target != i}


def naive_score(tokens: VisualTokens, row: int) -> list[float]:
    count = tokens.counts[row]
    attention = tokens.mean_query_attention[row, :, :count].double().mean(0)
    return (attention * tokens.previous_hidden[row, :count].double().norm(dim=1)).tolist()


def draw_clustered(count: int, keep: int, seed: int = 0, spread: float = 0.2) -> VisualTokens:
    """Return the tokens of one image with keys around nine points."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(9, 12, generator=g)[torch.randint(9, (count,), generator=g)]
    keys = keys + spread * torch.randn(count, 12, generator=g)
    return view([count], [keep], NEEDS, seed=seed, keys=keys[None])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"share": 1.0},
        {"share": 0.1, "reach": 0.0},
        {"cutoff": 0.0},
        {"cutoff": 0.21},
        {"cutoff": 0.6},
        {"cutoff": 2.0},
    ],
)
def test_matches_loop(options: dict[str, float]) -> None:
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            tokens = view(counts, wanted(counts, share), NEEDS, seed=seed)
            selection = select(tokens, **options)
            for row, (count, keep) in enumerate(zip(counts, tokens.keep, strict=True)):
                keys = tokens.keys[row, :count].double()
                want = (
                    (list(range(count)), {})
                    if keep == count
                    else naive(naive_score(tokens, row), keys, keep, **options)
                )
                assert list_groups(selection, row, count) == want, (counts, share, row)


@each("keep", [1, 5, 9, 12, 30, 59])
def test_clusters_match_loop(keep: int) -> None:
    """9: the count is exact, also if the number of centres jumps because keys are similar."""
    for seed, spread in ((0, 0.2), (1, 0.08), (2, 0.0)):
        tokens = draw_clustered(60, keep, seed, spread)
        selection = select(tokens)
        assert selection.keep.sum() == keep
        assert list_groups(selection, 0, 60) == naive(naive_score(tokens, 0), tokens.keys[0].double(), keep)


def test_rounds_match_sequential_selection() -> None:
    g = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 40):
        for share in (0.02, 0.2, 0.7):
            is_near = torch.rand(size, size, generator=g) < share
            is_near = (is_near | is_near.T).fill_diagonal_(True)
            distances = (~is_near).double().tolist()
            assert select_in_rounds(is_near, is_near[0] | True).nonzero().flatten().tolist() == naive_centres(
                distances, list(range(size)), 0.5
            )


def test_chunked_comparison_is_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for max_elements in (None, 1):
        if max_elements:
            monkeypatch.setattr(farthest, "TABLE", 0)
            monkeypatch.setattr(pairs, "_MAX_ELEMENTS", max_elements)
        results.append([list_groups(select(draw_clustered(300, keep)), 0, 300) for keep in (20, 150)])
    assert results[0] == results[1]


def test_cutoff_of_zero_merges_copies_only() -> None:
    keys = torch.randn(1, 20, 12, generator=torch.Generator().manual_seed(0)).repeat(1, 2, 1)
    tokens = view([40], [30], NEEDS, keys=keys, hidden=keys)
    selection = select(tokens, cutoff=0.0, share=1.0)
    assert list_groups(selection, 0, 40) == (list(range(20)), {20 + i: i for i in range(20)})
    torch.testing.assert_close(merged(tokens, selection)[0, :20], keys[0, :20])


def test_unimportant_copies_join_centre() -> None:
    keys = torch.randn(1, 20, 12, generator=torch.Generator().manual_seed(0))
    keys = torch.cat([keys.repeat(1, 2, 1), -keys], dim=1)
    attention = (torch.arange(60) < 20).float().expand(1, 2, -1)
    observed = {"mean_query_attention": attention, "previous_hidden": torch.ones(1, 60, 8)}
    tokens = visual_tokens(torch.randn(1, 60, 8), keep=30, keys=keys, **observed)
    selection = select(tokens, cutoff=0.0, share=0.34, reach=0.0)
    assert list_groups(selection, 0, 60) == (list(range(20)), {20 + i: i for i in range(20)})


def test_default_layer() -> None:
    """The default is a cut after layer 4 of 28, by the queries and keys of layer 4."""
    assert counts_of(tokenprune.method("pact"), 28, 100, 0.25) == [(5, 25)]
    assert counts_of(tokenprune.method("pact"), 2, 100, 0.25) == [(1, 25)]
    assert counts_of(tokenprune.method("pact", layer=3), 28, 100, 0.25) == [(3, 25)]


def test_prefix_cache_safe_and_content_count_with_cutoff() -> None:
    method = tokenprune.method("pact", cutoff=0.3)
    assert method.chooses_count and not tokenprune.method("pact").chooses_count
    assert method.prefix_cache_safe and not method.query_aware


def test_nan_token_is_least_important() -> None:
    attention = torch.rand(1, 2, 10, generator=torch.Generator().manual_seed(0))
    attention[0, :, 3] = torch.nan
    tokens = visual_tokens(
        torch.randn(1, 10, 8), keep=5, keys=torch.eye(10)[None], mean_query_attention=attention,
        previous_hidden=torch.ones(1, 10, 8),
    )  # fmt: skip
    kept, _ = list_groups(select(tokens), 0, 10)
    assert 3 not in kept and len(kept) == 5
