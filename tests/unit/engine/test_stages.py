# SPDX-License-Identifier: Apache-2.0
"""Stages of a method: counts by content, what they hand on, and looking only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from staged_methods import BATCHES, ByContent, Choose, Stage, Staged, batch, check, every, kind, visual_left
from tokenprune import Budget, VisualTokens
from zoo import FAMILIES, Family

# -- counts decided by content -----------------------------------------------------------------------------------------


@kind
@batch
def test_a_method_that_counts_by_content_is_asked_whatever_its_budget(family: Family, batch: str, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    cuts = check(family, model, ByContent(2, every(3)), inputs, keep=10_000)
    assert [cut.layer for cut in cuts] == [2]
    before = sum(map(sum, inputs.counts))
    assert 0 < sum(visual_left(family, model, inputs, cuts[0])) < before


def test_keeping_everything_asks_nobody(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)

    def never(tokens: VisualTokens) -> Tensor:
        raise AssertionError("asked with keep=1.0")

    with torch.no_grad():
        want = model(**inputs).logits
        for method in (ByContent(1, never), Staged((ByContent(1, never), Stage(2, never)))):
            with tokenprune.patched(model, method, keep=1.0):
                assert torch.equal(model(**inputs).logits, want)


def test_other_methods_are_not_asked_where_their_budget_is_all(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    asked = []
    with torch.no_grad(), tokenprune.patched(model, Stage(1, lambda tokens: asked.append(1)), keep=10_000):
        model(**inputs)
    assert not asked


@kind
def test_a_stage_is_told_what_a_stage_by_content_really_left(family: Family, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    reached: list[list[int]] = []

    def note(tokens: VisualTokens) -> Tensor:
        reached.append(list(tokens.counts))
        return torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]

    method = Staged((ByContent(1, every(2)), Stage(3, note)), (Budget(keep=10_000), Budget(keep=0.5)))
    cuts = check(family, model, method, inputs)
    counts = [count for row in inputs.counts for count in row]
    if len(reached[0]) == len(counts):  # else a piece is a tile
        assert reached[0] == [-(-count // 2) for count in counts]
    assert sum(visual_left(family, model, inputs, cuts[1])) == sum(max(1, round(n * 0.5)) for n in reached[0])


# -- what stages remember ----------------------------------------------------------------------------------------------


@kind
@batch
def test_what_a_stage_remembers_follows_the_tokens(family: Family, batch: str, build: Any) -> None:
    """Three stages: the first remembers where each token stands, the second cuts, the third finds the positions of
    those that are left; numbers for each image, and for the whole call, stay as they are."""
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    seen = []

    def first(tokens: VisualTokens) -> Tensor:
        position = tokens.segments.position.masked_fill(~tokens.mask, 0)
        tokens.remember("position", position)
        tokens.remember("wide", position[..., None].expand(-1, -1, 3).float())
        tokens.remember("row", torch.tensor(tokens.segments.row))
        tokens.remember("number", 7)
        return tokens.mask

    def last(tokens: VisualTokens) -> Tensor:
        position = tokens.segments.position.masked_fill(~tokens.mask, 0)
        assert torch.equal(tokens.carry["position"], position)
        assert torch.equal(tokens.carry["wide"], position[..., None].expand(-1, -1, 3).float())
        assert tokens.carry["row"].tolist() == tokens.segments.row and tokens.carry["number"] == 7
        seen.append(tokens.counts)
        return every(2, 1)(tokens) | (torch.arange(tokens.mask.shape[1]) == 0)

    whole = Budget(keep=1.0)
    method = Staged((ByContent(1, first), Stage(2, every(3)), ByContent(3, last)), (whole, Budget(keep=0.4), whole))
    cuts = check(family, model, method, inputs)
    assert len(seen) == 2 and [cut.layer for cut in cuts] == [2, 3]  # a forward, and the prefill of generate


def test_what_has_the_shape_of_tokens_by_chance_can_stay(build: Any) -> None:
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()

    def first(tokens: VisualTokens) -> Tensor:
        tokens.remember("square", torch.ones(tokens.mask.shape), per_token=False)
        tokens.remember("same", torch.ones(tokens.mask.shape), per_token=False)
        tokens.remember("same", torch.ones(tokens.mask.shape))
        return every(2)(tokens)

    def last(tokens: VisualTokens) -> Tensor:
        assert tokens.carry["square"].shape[1] == 2 * tokens.carry["same"].shape[1]
        assert tokens.carry["same"].shape == tokens.mask.shape
        return tokens.mask

    method = Staged((ByContent(1, first), ByContent(2, last)), (Budget(keep=0.5),) * 2)
    check(family, model, method, inputs)


def test_composed_methods_do_not_see_what_the_other_remembers(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    found = []

    def remember(value: int) -> Choose:
        def choose(tokens: VisualTokens) -> Tensor:
            found.append(dict(tokens.carry))
            tokens.remember("mine", value)
            return tokens.mask

        return choose

    one = Staged((ByContent(1, remember(1)), ByContent(3, remember(2))))
    two = ByContent(2, remember(3))
    with torch.no_grad(), tokenprune.patched(model, [one, two], keep=[0.5, 0.5]):
        model(**inputs)
        model(**inputs)
    assert found == [{}, {}, {"mine": 1}] * 2  # and nothing is left from one call to the next


# -- stages that only look ---------------------------------------------------------------------------------------------


@kind
@batch
def test_a_stage_that_only_looks_changes_nothing(family: Family, batch: str, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    asked = []
    method = Staged((ByContent(1, lambda tokens: asked.append(1) or tokens.mask),))
    with torch.no_grad():
        want = model(**inputs).logits
        with tokenprune.patched(model, method, keep=10_000, record=True):
            assert torch.equal(model(**inputs).logits, want)
            stats = tokenprune.stats(model)
    assert asked and not stats.cuts and not stats.removals and stats.keep_ratio == 1
    assert check(family, model, method, inputs, keep=10_000) == []


def test_nothing_is_compacted_where_nothing_leaves(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenprune.integrations.hf.forward.token_state import Layout

    model, inputs = FAMILIES["llava"].prepare(build)
    monkeypatch.setattr(Layout, "cut", lambda *args: pytest.fail("compacted"))
    with torch.no_grad(), tokenprune.patched(model, ByContent(1), keep=0.5):
        model(**inputs)
