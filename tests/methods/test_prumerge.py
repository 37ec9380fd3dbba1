# SPDX-License-Identifier: Apache-2.0
"""prumerge and prumerge_plus against loops written from their description; numbers are those of its invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tokenprune
from tokenprune import OptionError, Selection
from tokenprune.integrations.shared.selection import merge_tokens
from tokenprune.view.tokens import VisualTokens
from tower_tokens import LAYOUTS, best, budgets, kept_of, parts, tiles_of, tower_tokens

BOTH = ("prumerge", "prumerge_plus")


def picks(tile: list[int], score: list[float], number: int, plus: bool) -> list[int]:
    if not plus:
        return best(tile, score, number)
    first = best(tile, score, max(1, (number + 2) // 4)) if number else []
    rest, wanted = [i for i in tile if i not in first], number - len(first)
    return first + [rest[j * len(rest) // wanted] for j in range(wanted)]


def outliers(tile: list[int], score: list[float]) -> int:
    values = np.array([score[i] for i in tile])
    first, third = np.percentile(values, [25, 75])
    return int((values > third + 1.5 * (third - first)).sum())


def adaptive(tile: list[int], score: list[float], plus: bool) -> list[int]:
    number = outliers(tile, score)
    first = best(tile, score, number)
    if plus and number:
        step = max(1, int(int(len(tile) / number) / 3))
        first += [tile[p] for p in range(0, len(tile) - 1, step) if tile[p] not in first]
    return first


def naive(tokens: VisualTokens, image: int, name: str, merge: str = "rest", exact: bool = True) -> tuple[list, dict]:
    """Kept tokens, and of each dropped one that joins another, which."""
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    keys = tokens.encoder_keys(-1)[image].double()
    keys = keys / keys.norm(dim=-1, keepdim=True)
    alike = (keys @ keys.T).mul(1e6).round().tolist()
    kept, into, plus = [], {}, name == "prumerge_plus"
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        if exact:
            extra = merge == "rest" and 0 < number < len(tile)
            own = picks(tile, score, number - extra, plus)
        else:
            own = adaptive(tile, score, plus)
            extra = len(own) < len(tile) and (merge == "rest" or not own)
        rest = [i for i in tile if i not in own]
        slot = best(rest, score, 1) if extra else []
        own += slot
        for i in rest:
            if i in slot:
                continue
            if merge == "rest" and slot:
                into[i] = slot[0]
            if merge == "clusters":
                near = [j for j in own if i in sorted((m for m in tile if m != j), key=lambda m: -alike[j][m])[:32]]
                if near:
                    into[i] = max(near, key=lambda j: (alike[i][j], -j))
        kept += own
    return sorted(kept + (others[: tokens.keep[image] - len(kept)] if exact else [])), into


def select(name: str, tokens: VisualTokens, **options: Any) -> Selection:
    return tokenprune.method(name, **options).select(tokens)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tiles", "thin"])
def test_equals_the_loop(name: str, layout: Any) -> None:
    """1, 4, 6: exactly the budget; what is kept and what is not are all there is; a cluster holds the 32 nearest."""
    for number, keep in enumerate(budgets(layout)):
        for ties in (False, True):
            tokens = tower_tokens(layout, keep, seed=number, ties=ties)
            for merge in ("rest", "none") if ties else ("rest", "clusters", "none"):
                selection = select(name, tokens, merge=merge)
                for image, count in enumerate(tokens.counts):
                    kept, into = naive(tokens, image, name, merge)
                    assert kept_of(selection.keep)[image] == kept and len(kept) == keep[image]
                    want = [i if i in kept else into.get(i, -1) for i in range(count)]
                    assert merge == "none" or selection.assign[image, :count].tolist() == want
                assert (selection.assign is None) == (merge == "none")


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("merge", ["rest", "none"])
def test_the_authors_number(name: str, merge: str) -> None:
    """1, 2, 9: numpy's rule, tile by tile; without any outlier, with few, and with more than a third."""
    layout = [([(8, 8), (5, 4)], 2), ([(12, 12)], 0)]
    for power in (1, 4, 16):
        tokens = tower_tokens(layout, [20, 40], heads=1)
        tokens = tower_tokens(layout, [20, 40], encoder_attention={-1: tokens.encoder_attention(-1) ** power})
        selection = select(name, tokens, merge=merge, exact=False)
        want = [naive(tokens, image, name, merge, exact=False) for image in range(2)]
        assert kept_of(selection.keep) == [kept for kept, _ in want] and selection.counts is None
    for given in (torch.full((1, 1, 64), 0.5), (torch.arange(64) % 5 == 0).float()[None, None]):
        tokens = tower_tokens([([(8, 8)], 0)], [9], encoder_attention={-1: given})
        kept, _ = naive(tokens, 0, name, merge, exact=False)
        assert kept_of(select(name, tokens, merge=merge, exact=False).keep) == [kept] and kept
        assert len(kept) == 1 or bool(given.max() == 1)
    whole = tower_tokens([([(8, 8)], 0)], [64])
    assert select(name, whole, exact=False).keep.all()  # nothing is to go


@pytest.mark.parametrize("name", BOTH)
def test_papers_sizes_in_bfloat16(name: str) -> None:
    tokens = tower_tokens([([(24, 24)], 0)], [144], dtype=torch.bfloat16)
    kept, _ = naive(tokens, 0, name)
    assert kept_of(select(name, tokens).keep) == [kept]


def merged(tokens: VisualTokens, selection: Selection) -> torch.Tensor:
    return merge_tokens(tokens.hidden, selection, tokens.segments, tokens.segments.position)[0]


def test_one_token_stands_for_all_others() -> None:
    """3, 5: the mean by attention of exactly the complement; the others stay as they are; so do all without any
    attention."""
    tokens = tower_tokens([([(8, 8)], 0)], [9])
    selection = select("prumerge", tokens)
    kept, into = naive(tokens, 0, "prumerge")
    (slot,) = set(into.values())
    rest, weight = [*into, slot], tokens.encoder_attention(-1)[0].mean(0)
    out = merged(tokens, selection)
    torch.testing.assert_close(out[slot], (tokens.hidden[0, rest] * weight[rest, None]).sum(0) / weight[rest].sum())
    others = [i for i in kept if i != slot]
    assert torch.equal(out[others], tokens.hidden[0, others])
    none = tower_tokens([([(8, 8)], 0)], [9], encoder_attention={-1: torch.zeros(1, 1, 64)})
    assert torch.equal(merged(none, select("prumerge", none)), none.hidden[0])


def test_clusters_are_means_by_attention() -> None:
    tokens = tower_tokens([([(8, 8)], 0)], [9])
    out, (kept, into) = merged(tokens, select("prumerge", tokens, merge="clusters")), naive(tokens, 0, "", "clusters")
    weight = tokens.encoder_attention(-1)[0].mean(0)
    for target in kept:
        group = [target, *(i for i, j in into.items() if j == target)]
        want = (tokens.hidden[0, group] * weight[group, None]).sum(0) / weight[group].sum()
        torch.testing.assert_close(out[target], want)


def test_many_kept_ones_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tower_tokens(LAYOUTS[1], [30, 9])
    whole = select("prumerge", tokens, merge="clusters").assign
    monkeypatch.setattr("tokenprune.ops.clusters._AT_ONCE", 3 * tokens.mask.numel())
    assert torch.equal(select("prumerge", tokens, merge="clusters").assign, whole)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("options", [{"merge": "all"}, {"neighbours": 0}, {"exact": 1}], ids=str)
def test_options(name: str, options: dict) -> None:
    with pytest.raises(OptionError, match=name):
        tokenprune.method(name, **options)
