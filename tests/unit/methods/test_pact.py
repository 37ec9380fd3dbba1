# SPDX-License-Identifier: Apache-2.0
"""pact against a loop written from its description; numbers are those of the description's invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from each import each
from several_cuts import COUNTS, SHARES, counts_of, view, wanted
from tests.unit.methods.naive.pact import centres as naive_centres
from tests.unit.methods.naive.pact import distance, naive
from tokenprune import Selection, VisualTokens
from tokenprune.kernels import farthest, pairs
from tokenprune.methods.in_llm.pact import select_in_rounds
from tokenprune.testing import check_method, visual_tokens
from tower_tokens import merged

NEEDS = ("keys", "mean_query_attention", "previous_hidden")


def select(tokens: VisualTokens, **options: Any) -> Selection:
    return tokenprune.method("pact", layer=2, **options).select(tokens)


def groups(selection: Selection, row: int, count: int) -> tuple[list[int], dict[int, int]]:
    """Return the tokens that stay, and the one that each other token joins."""
    kept = selection.keep[row].nonzero().flatten().tolist()
    assign = selection.assign[row, :count].tolist()
    return kept, {i: to for i, to in enumerate(assign) if to >= 0 and to != i}


def score_of(tokens: VisualTokens, row: int) -> list[float]:
    count = tokens.counts[row]
    attention = tokens.mean_query_attention[row, :, :count].double().mean(0)
    return (attention * tokens.previous_hidden[row, :count].double().norm(dim=1)).tolist()


def clustered(count: int, keep: int, seed: int = 0, spread: float = 0.2) -> VisualTokens:
    """One image, whose keys lie around nine points."""
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(9, 12, generator=g)[torch.randint(9, (count,), generator=g)]
    keys = keys + spread * torch.randn(count, 12, generator=g)
    return view([count], [keep], NEEDS, seed=seed, keys=keys[None])


@pytest.mark.parametrize(
    "options", [{}, {"share": 1.0}, {"share": 0.1, "reach": 0.0}, {"cutoff": 0.21}, {"cutoff": 0.6}]
)
def test_against_a_loop(options: dict[str, float]) -> None:
    for seed, counts in enumerate(COUNTS):
        for share in SHARES:
            tokens = view(counts, wanted(counts, share), NEEDS, seed=seed)
            selection = select(tokens, **options)
            for row, (count, keep) in enumerate(zip(counts, tokens.keep, strict=True)):
                keys = tokens.keys[row, :count].double()
                want = (
                    (list(range(count)), {}) if keep == count else naive(score_of(tokens, row), keys, keep, **options)
                )
                assert groups(selection, row, count) == want, (counts, share, row)


@each("keep", [1, 5, 9, 12, 30, 59])
def test_clusters_against_a_loop(keep: int) -> None:
    """9: exact, whatever the keys: where most of them are alike, the number of centres jumps."""
    for seed, spread in ((0, 0.2), (1, 0.08), (2, 0.0)):
        tokens = clustered(60, keep, seed, spread)
        selection = select(tokens)
        assert selection.keep.sum() == keep
        assert groups(selection, 0, 60) == naive(score_of(tokens, 0), tokens.keys[0].double(), keep)


@pytest.mark.parametrize("cutoff", [0.0, 0.05, 0.2, 0.7, 2.0])
def test_what_a_cutoff_means(cutoff: float) -> None:
    """2, 4 and 5: centres are further apart, what matters is within it, and what is gone is beyond its reach."""
    tokens = clustered(60, 30)
    kept, into = groups(select(tokens, cutoff=cutoff), 0, 60)
    keys = tokens.keys[0].double()
    assert all(distance(keys[i], keys[j]) > cutoff for i in kept for j in kept if i < j)
    matters = sorted(range(60), key=lambda i: -score_of(tokens, 0)[i])[:33]
    assert set(matters) <= {*kept, *into} and set(kept) <= set(matters)
    for i in range(60):
        nearest = min(distance(keys[i], keys[j]) for j in kept)
        assert i not in matters or nearest <= cutoff
        assert (i in kept or i in into) == (i in matters or nearest <= 1.5 * cutoff)


def test_rounds_find_what_one_after_the_other_finds() -> None:
    """3: among tokens of all densities."""
    g = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 40):
        for share in (0.02, 0.2, 0.7):
            near = torch.rand(size, size, generator=g) < share
            near = (near | near.T).fill_diagonal_(True)
            apart = (~near).double().tolist()
            assert select_in_rounds(near, near[0] | True).nonzero().flatten().tolist() == naive_centres(
                apart, list(range(size)), 0.5
            )


def test_many_tokens_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a table of all pairs."""
    made = []
    for number in (None, 1):
        if number:
            monkeypatch.setattr(farthest, "TABLE", 0)
            monkeypatch.setattr(pairs, "_AT_ONCE", number)
        made.append([groups(select(clustered(300, keep)), 0, 300) for keep in (20, 150)])
    assert made[0] == made[1]


def test_a_cutoff_of_zero_merges_copies_alone() -> None:
    """1: with all tokens; a merged token is what its copies are."""
    keys = torch.randn(1, 20, 12, generator=torch.Generator().manual_seed(0)).repeat(1, 2, 1)
    tokens = view([40], [30], NEEDS, keys=keys, hidden=keys)
    selection = select(tokens, cutoff=0.0, share=1.0)
    assert groups(selection, 0, 40) == (list(range(20)), {20 + i: i for i in range(20)})
    torch.testing.assert_close(merged(tokens, selection)[0, :20], keys[0, :20])


def test_copies_of_a_centre_join_it_though_they_do_not_matter() -> None:
    """At any reach; what else does not matter is gone."""
    keys = torch.randn(1, 20, 12, generator=torch.Generator().manual_seed(0))
    keys = torch.cat([keys.repeat(1, 2, 1), -keys], dim=1)
    attention = (torch.arange(60) < 20).float().expand(1, 2, -1)
    given = {"mean_query_attention": attention, "previous_hidden": torch.ones(1, 60, 8)}
    tokens = visual_tokens(torch.randn(1, 60, 8), keep=30, keys=keys, **given)
    selection = select(tokens, cutoff=0.0, share=0.34, reach=0.0)
    assert groups(selection, 0, 60) == (list(range(20)), {20 + i: i for i in range(20)})


def test_a_cluster_becomes_its_mean() -> None:
    tokens = clustered(60, 9)
    selection = select(tokens)
    out = merged(tokens, selection)[0]
    kept, into = groups(selection, 0, 60)
    for centre in kept:
        members = [centre, *(i for i, to in into.items() if to == centre)]
        torch.testing.assert_close(out[centre], tokens.hidden[0, members].mean(0))


def test_where_it_cuts() -> None:
    """Behind layer 4 of 28, whose queries and keys rate."""
    assert counts_of(tokenprune.method("pact"), 28, 100, 0.25) == [(5, 25)]
    assert counts_of(tokenprune.method("pact"), 2, 100, 0.25) == [(1, 25)]
    assert counts_of(tokenprune.method("pact", layer=3), 28, 100, 0.25) == [(3, 25)]


def test_it_is_safe_with_a_prefix_cache_and_by_content_with_a_cutoff() -> None:
    method = tokenprune.method("pact", cutoff=0.3)
    check_method(method)
    assert method.chooses_count and not tokenprune.method("pact").chooses_count
    assert method.prefix_cache_safe and not method.query_aware


def test_a_token_without_a_number_matters_least() -> None:
    attention = torch.rand(1, 2, 10, generator=torch.Generator().manual_seed(0))
    attention[0, :, 3] = torch.nan
    tokens = visual_tokens(
        torch.randn(1, 10, 8), keep=5, keys=torch.eye(10)[None], mean_query_attention=attention,
        previous_hidden=torch.ones(1, 10, 8),
    )  # fmt: skip
    kept, _ = groups(select(tokens), 0, 10)
    assert 3 not in kept and len(kept) == 5
