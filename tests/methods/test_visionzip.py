# SPDX-License-Identifier: Apache-2.0
"""visionzip against a loop written from its description; numbers are those of the description's invariants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from tokenprune import OptionError, Selection
from tokenprune.integrations.shared.selection import merge_tokens
from tokenprune.view.tokens import VisualTokens
from tower_tokens import LAYOUTS, best, budgets, kept_of, parts, tiles_of, tower_tokens


def naive(tokens: VisualTokens, image: int, context: float = 10 / 64) -> tuple[list[int], list[int], dict[int, int]]:
    """Dominant tokens, contextual ones, and which of these each other token joins."""
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].double().sum(0).tolist()
    heads = tokens.encoder_attention(-1).shape[1]
    keys = tokens.encoder_keys(-1)[image].double().unflatten(-1, (heads, -1)).mean(1)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    dominant, contextual, into = [], [], {}
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        few = min(int(number * context + 0.5), max(number - 1, 0))
        first = best(tile, score, number - few)
        rest = [i for i in tile if i not in first]
        step = max(1, len(rest) // max(few, 1))
        targets = rest[::step][:few]
        for i in rest:
            if i not in targets and targets:
                into[i] = max(targets, key=lambda j: (round(float(keys[i] @ keys[j]), 6), -j))
        dominant, contextual = dominant + first, contextual + targets
    left = tokens.keep[image] - len(dominant) - len(contextual)
    return sorted(dominant + others[:left]), contextual, into


def select(tokens: VisualTokens, **options: Any) -> Selection:
    return tokenprune.method("visionzip", **options).select(tokens)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tiles", "thin"])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_loop(layout: Any, ties: bool) -> None:
    """2, 3, 4: exactly the budget; the dominant ones are the top; who is neither joins one target."""
    for number, keep in enumerate(budgets(layout)):
        tokens = tower_tokens(layout, keep, seed=number, ties=ties)
        for context in (10 / 64, 0.0, 0.5):
            selection = select(tokens, context=context)
            for image, count in enumerate(tokens.counts):
                dominant, contextual, into = naive(tokens, image, context)
                assert kept_of(selection.keep)[image] == sorted(dominant + contextual)
                kept = {*dominant, *contextual}
                want = [i if i in kept else into.get(i, -1) for i in range(count)]
                assert selection.assign[image, :count].tolist() == want
                assert (selection.assign[image, count:] == -1).all() and len(kept) == keep[image]


@pytest.mark.parametrize(("count", "keep"), [((24, 24), 64), ((24, 24), 192), ((48, 60), 320)])
def test_papers_sizes_in_bfloat16(count: tuple[int, int], keep: int) -> None:
    tokens = tower_tokens([([count], 0)], [keep], dtype=torch.bfloat16, heads=2)
    dominant, contextual, into = naive(tokens, 0)
    assert len(contextual) == {64: 10, 192: 30, 320: 50}[keep]
    selection = select(tokens)
    assert kept_of(selection.keep)[0] == sorted(dominant + contextual)
    same = sum(selection.assign[0, i] == j for i, j in into.items())
    assert same == len(into)


def merged(tokens: VisualTokens, selection: Selection) -> Tensor:
    places = tokens.segments.position + torch.arange(len(tokens.counts))[:, None] * tokens.mask.shape[1]
    return merge_tokens(tokens.hidden, selection, tokens.segments, places)


def test_a_contextual_token_is_half_of_target_and_mean() -> None:
    """5, and 1: with everything kept nothing changes; a target that nothing joins stays as it is."""
    tokens = tower_tokens([([(8, 8)], 0)], [24])
    dominant, contextual, into = naive(tokens, 0)
    for options, weigh in (
        ({}, lambda x, members: (x + members.mean(0)) / 2),
        ({"centre": 0.8}, lambda x, members: 0.8 * x + 0.2 * members.mean(0)),
        ({"centre": None}, lambda x, members: torch.cat([x[None], members]).mean(0)),
    ):
        out = merged(tokens, select(tokens, **options))[0]
        for target in contextual:
            members = [i for i, j in into.items() if j == target]
            want = weigh(tokens.hidden[0, target], tokens.hidden[0, members]) if members else tokens.hidden[0, target]
            torch.testing.assert_close(out[target], want)
        assert torch.equal(out[dominant], tokens.hidden[0, dominant])
    whole = tower_tokens([([(8, 8)], 0)], [64])
    assert torch.equal(merged(whole, select(whole)), whole.hidden)


def test_what_does_not_change_the_choice() -> None:
    """6, 7: the length of keys; what is in the batch beside an image; the order of heads."""
    layout = LAYOUTS[1]
    tokens = tower_tokens(layout, [20, 7])
    chosen = select(tokens)
    keys = {-1: tokens.encoder_keys(-1) * 2.0 ** torch.randint(-3, 4, (2, tokens.mask.shape[1], 1))}
    heads = {-1: tokens.encoder_attention(-1).flip(1)}
    for given in ({"encoder_keys": keys}, {"encoder_attention": heads}):
        other = select(tower_tokens(layout, [20, 7], **given))
        assert torch.equal(other.assign, chosen.assign)


@pytest.mark.parametrize("options", [{"context": 1.0}, {"context": -0.1}, {"centre": 0}, {"centre": "half"}], ids=str)
def test_options(options: dict) -> None:
    with pytest.raises(OptionError, match="visionzip"):
        tokenprune.method("visionzip", **options)
