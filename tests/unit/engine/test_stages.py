# SPDX-License-Identifier: Apache-2.0
"""Stages of a method: counts that depend on content, values passed between stages, and stages without a cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from staged_methods import BATCHES, ByContent, Choose, Stage, Staged, batch, check, every, kind, visual_left
from tokenprune import Budget, VisualTokens
from zoo import FAMILIES, Family

# -- counts that depend on content -------------------------------------------------------------------------------------


@kind
@batch
def test_a_method_that_counts_by_content_is_asked_whatever_its_budget(family: Family, batch: str, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    cuts = check(family, model, ByContent(2, every(3)), inputs, keep=10_000)
    assert [cut.layer for cut in cuts] == [2]
    before = sum(map(sum, inputs.counts))
    assert 0 < sum(visual_left(family, model, inputs, cuts[0])) < before


def test_keep_all_calls_no_method(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)

    def fail_if_called(tokens: VisualTokens) -> Tensor:
        raise AssertionError("called with keep=1.0")

    with torch.no_grad():
        want = model(**inputs).logits
        for method in (ByContent(1, fail_if_called), Staged((ByContent(1, fail_if_called), Stage(2, fail_if_called)))):
            with tokenprune.patched(model, method, keep=1.0):
                assert torch.equal(model(**inputs).logits, want)


def test_methods_are_not_called_if_their_budget_is_all(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    calls = []
    with torch.no_grad(), tokenprune.patched(model, Stage(1, lambda tokens: calls.append(1)), keep=10_000):
        model(**inputs)
    assert not calls


@kind
def test_stages_get_the_actual_counts(family: Family, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(images=(2, 1))
    reached: list[list[int]] = []

    def note(tokens: VisualTokens) -> Tensor:
        reached.append(list(tokens.counts))
        return torch.arange(tokens.mask.shape[1]) < tokens.budget[:, None]

    method = Staged((ByContent(1, every(2)), Stage(3, note)), (Budget(keep=10_000), Budget(keep=0.5)))
    cuts = check(family, model, method, inputs)
    counts = [count for row in inputs.counts for count in row]
    if len(reached[0]) == len(counts):  # otherwise a segment is a tile
        assert reached[0] == [-(-count // 2) for count in counts]
    assert sum(visual_left(family, model, inputs, cuts[1])) == sum(max(1, round(n * 0.5)) for n in reached[0])


# -- values that stages remember ---------------------------------------------------------------------------------------


@kind
@batch
def test_remembered_values_follow_the_tokens(family: Family, batch: str, build: Any) -> None:
    """A cut between two stages selects the remembered values per token and per image; other values are unchanged."""
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    counts = []

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
        counts.append(tokens.counts)
        return every(2, 1)(tokens) | (torch.arange(tokens.mask.shape[1]) == 0)

    keep_all = Budget(keep=1.0)
    method = Staged(
        (ByContent(1, first), Stage(2, every(3)), ByContent(3, last)), (keep_all, Budget(keep=0.4), keep_all)
    )
    cuts = check(family, model, method, inputs)
    assert len(counts) == 2 and [cut.layer for cut in cuts] == [2, 3]  # one forward, and the prefill of generate


def test_values_with_per_token_false_are_not_selected(build: Any) -> None:
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


def test_composed_methods_have_separate_carries(build: Any) -> None:
    model, inputs = FAMILIES["llava"].prepare(build)
    carries = []

    def remember(value: int) -> Choose:
        def choose(tokens: VisualTokens) -> Tensor:
            carries.append(dict(tokens.carry))
            tokens.remember("mine", value)
            return tokens.mask

        return choose

    first = Staged((ByContent(1, remember(1)), ByContent(3, remember(2))))
    second = ByContent(2, remember(3))
    with torch.no_grad(), tokenprune.patched(model, [first, second], keep=[0.5, 0.5]):
        model(**inputs)
        model(**inputs)
    assert carries == [{}, {}, {"mine": 1}] * 2  # values do not survive a call


# -- stages without a cut ----------------------------------------------------------------------------------------------


@kind
@batch
def test_stage_without_a_cut_changes_nothing(family: Family, batch: str, build: Any) -> None:
    model, inputs = build(family), family.make_inputs(**BATCHES[batch])
    calls = []
    method = Staged((ByContent(1, lambda tokens: calls.append(1) or tokens.mask),))
    with torch.no_grad():
        want = model(**inputs).logits
        with tokenprune.patched(model, method, keep=10_000, record=True):
            assert torch.equal(model(**inputs).logits, want)
            stats = tokenprune.stats(model)
    assert calls and not stats.cuts and not stats.removals and stats.keep_ratio == 1
    assert check(family, model, method, inputs, keep=10_000) == []


def test_no_compaction_without_a_cut(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenprune.integrations.hf.forward.token_state import Layout

    model, inputs = FAMILIES["llava"].prepare(build)
    monkeypatch.setattr(Layout, "cut", lambda *args: pytest.fail("compacted"))
    with torch.no_grad(), tokenprune.patched(model, ByContent(1), keep=0.5):
        model(**inputs)
