# SPDX-License-Identifier: Apache-2.0
"""Budgets of several cuts: schedules for synthetic decoders, and a method with three cuts in models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenprune
from basics import pieces
from pyramid import Pyramid
from tokenprune import Budget, BudgetError, Method, OptionError
from tokenprune.budgets.schedule import choose_layers, plan_cuts
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES, Family


def make_decoder(layers: int, kv_heads: int | tuple[int, ...] = 2) -> DecoderShape:
    return DecoderShape(layers, hidden=64, intermediate=128, heads=4, kv_heads=kv_heads, head_dim=16)


def count_per_layer(cuts: list, counts: list[int], shape: DecoderShape, text: int = 10) -> list[list[int]]:
    """Return each segment's token count per layer. As in an engine, a cut is resolved with the counts that reach it."""
    current, tokens_per_layer = list(counts), [[] for _ in counts]
    by_layer = {cut.layer: cut.budget for cut in cuts}
    for layer in range(shape.layers):
        if layer in by_layer:
            current = by_layer[layer].resolve(current, layer=layer, shape=shape, text_tokens=text, original=counts)
        for tokens, count in zip(tokens_per_layer, current, strict=True):
            tokens.append(count)
    return tokens_per_layer


PYRAMID = ((0.25, 0.5), (0.5, 0.25), (0.75, 0.125))
# Four stages of 576 tokens: 576, 288, 144 and 72.
PUBLISHED = (576 + 288 + 144 + 72) / 4


@pytest.mark.parametrize(
    "budget",
    [
        dict(keep=PUBLISHED / 576),
        dict(keep=270),
        dict(average_tokens=PUBLISHED),
        dict(average_share=PUBLISHED / 576),
        dict(kv_share=PUBLISHED / 576),
    ],
    ids=str,
)
def test_published_schedules_are_reproduced(budget: dict) -> None:
    cuts = plan_cuts(32, PYRAMID, Budget.from_json(budget))
    assert [cut.layer for cut in cuts] == [8, 16, 24]
    (tokens,) = count_per_layer(cuts, [576], make_decoder(32))
    assert tokens == [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8


def test_budget_of_one_token_differs_from_keep_all() -> None:
    """1 == 1.0 in Python, but a cached result for one budget is not used for the other."""
    cuts, shape = [(1, 1.0), (2, 0.5)], make_decoder(8)
    options = dict(shape=shape, text_tokens=3)
    assert Budget(keep=1.0).solve(cuts, [77], **options) == [[77], [77]]
    with pytest.raises(BudgetError, match="layer 1"):
        Budget(tokens=1).solve(cuts, [77], **options)
    assert Budget(tokens=1).solve([(0, 1.0)], [78], **options) == [[1]]
    assert Budget(keep=1.0).solve([(0, 1.0)], [78], **options) == [[78]]


@st.composite
def schedules(draw: Any) -> tuple[int, list[tuple[int, float]]]:
    layers = draw(st.integers(2, 40))
    cut_layers = sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=5)))
    relative = sorted(
        draw(st.lists(st.floats(0.01, 5), min_size=len(cut_layers), max_size=len(cut_layers))), reverse=True
    )
    return layers, list(zip(cut_layers, relative, strict=True))


@settings(deadline=None, max_examples=200)
@given(schedules(), st.lists(st.integers(1, 900), min_size=1, max_size=4), st.floats(0.01, 1), st.data())
def test_the_average_over_layers_is_the_budget(schedule: Any, counts: list[int], share: float, data: Any) -> None:
    """The average is exact to one token per segment, for all kinds of budget. An unreachable budget raises."""
    layers, cuts = schedule
    kv_heads = data.draw(st.one_of(st.integers(1, 4), st.tuples(*[st.integers(1, 4)] * layers)))
    shape, text = make_decoder(layers, kv_heads), data.draw(st.integers(1, 300))
    kind = data.draw(st.sampled_from(["keep", "int", "average_tokens", "average_share", "kv_share", "flops_share"]))
    shares = ("keep", "average_share", "kv_share")
    tokens = max(1, round(share * max(counts)))
    budget = {"int": Budget(tokens=tokens), "average_tokens": Budget(average_tokens=tokens + share)}.get(kind)
    budget = budget or Budget.from_json({kind: share})
    weights = shape.kv_widths if kind == "kv_share" else [1] * layers
    before = sum(weights[: cuts[0][0]]) / sum(weights)

    def cost(segments: list[list[float]]) -> float:
        return shape.prefill_flops([text + sum(column) for column in zip(*segments, strict=True)])

    unpruned_cost = cost([[count] * layers for count in counts])
    minimum = [[count] * cuts[0][0] + [0] * (layers - cuts[0][0]) for count in counts]
    try:
        got = count_per_layer(plan_cuts(layers, cuts, budget), counts, shape, text)
    except BudgetError as error:
        assert "cannot be reached" in str(error)
        if kind == "flops_share":
            assert cost(minimum) >= share * unpruned_cost * (1 - 1e-9)
        else:
            requested = [share if kind in shares else min(1, (budget.keep or budget.average_tokens) / n)
                     for n in counts]  # fmt: skip
            assert any(before >= x - 1e-9 for x in requested)
        return
    for count, segment_counts in zip(counts, got, strict=True):
        assert all(
            1 <= after <= before for before, after in zip([count, *segment_counts], segment_counts, strict=False)
        )
        if kind != "flops_share":
            average = sum(w * n for w, n in zip(weights, segment_counts, strict=True)) / sum(weights)
            target = share * count if kind in shares else budget.keep or budget.average_tokens
            assert abs(average - min(target, count)) <= 1
    if kind == "flops_share":
        # One token less per segment is below the target, and one token more is above it.
        fewer = [[max(0, n - (layer >= cuts[0][0])) for layer, n in enumerate(row)] for row in got]
        more = [[min(c, n + 1) for n in row] for row, c in zip(got, counts, strict=True)]
        assert cost(fewer) <= share * unpruned_cost * (1 + 1e-9) or all(
            n <= 1 for row in got for n in row[cuts[0][0] :]
        )
        assert cost(more) >= share * unpruned_cost * (1 - 1e-9)


def test_invalid_schedules_raise() -> None:
    budget = Budget(keep=0.5)
    with pytest.raises(OptionError, match="layer 1"):  # 0.25 and 0.3 of four layers
        plan_cuts(4, ((0.25, 0.5), (0.3, 0.25)), budget)
    with pytest.raises(OptionError, match="layer 32 is out of range"):
        plan_cuts(32, ((32, 0.5),), budget)
    with pytest.raises(OptionError, match="more than"):
        plan_cuts(32, ((8, 0.25), (16, 0.5)), budget)
    with pytest.raises(OptionError, match="relative"):
        plan_cuts(32, ((8, 0.0),), budget)
    with pytest.raises(OptionError, match="at least one cut"):
        plan_cuts(32, (), budget)
    with pytest.raises(BudgetError, match=r"layers before it spend 0\.250"):  # before any call
        plan_cuts(32, PYRAMID, Budget(keep=0.2))
    assert all(cut.budget.is_identity() for cut in plan_cuts(32, PYRAMID, Budget(keep=1.0)))


# -- in models ---------------------------------------------------------------------------------------------------------


def read_counts_per_layer(cuts: list, row: int, piece: list[int], layers: int) -> list[int]:
    """Return the token count of a segment per layer, from the recorded cuts."""
    num_tokens, per_layer = len(piece), []
    by_layer = {cut.layer: cut for cut in cuts}
    for layer in range(layers):
        if layer in by_layer:
            num_tokens = len(set(piece) & set(by_layer[layer].kept[row]))
        per_layer.append(num_tokens)
    return per_layer


@pytest.mark.few_families
@pytest.mark.parametrize("method", [Pyramid(), "vscan"], ids=["pyramid", "vscan"])
@pytest.mark.parametrize(
    "keep",
    [0.4, 0.75, 0.999, 9, 21, Budget(average_tokens=11.5), Budget.from_kv_share(0.6), Budget.from_flops_share(0.7)],
    ids=str,
)
@torch.no_grad()
def test_a_run_meets_the_budget(method: Any, keep: Any, family: Family, model: Any) -> None:
    budget = Budget.from_keep(keep)
    # A row without images always computes all its FLOPs.
    inputs = family.make_inputs(images=(2, 1, 0) if budget.target != "flops_share" else (2, 1))
    largest = max(max(row) for row in inputs.counts if row)
    requested = budget.average_tokens or (budget.keep if isinstance(budget.keep, int) else None)
    if method != "vscan" and requested and requested <= largest / 4:
        with tokenprune.patched(model, method, keep=keep), pytest.raises(BudgetError, match="layer 1 of 4"):
            model(**inputs)
        return
    with tokenprune.patched(model, method, keep=keep, record=True):
        model(**inputs)
        stats = tokenprune.stats(model)
    if budget.target == "flops_share":
        assert stats.prefill_flops_ratio_tokens == pytest.approx(budget.amount, abs=0.03)
        return
    newlines = family.name in ("llava_next", "llava_onevision")  # stage 1 of vscan keeps newlines for any budget
    for row, row_pieces in enumerate(pieces(family, inputs)):
        for piece in row_pieces:
            tokens = read_counts_per_layer(stats.cuts, row, piece, 4)
            target = min(len(piece), requested or budget.amount * len(piece))
            assert abs(sum(tokens) / 4 - target) <= 1 or (newlines and method == "vscan")


@torch.no_grad()
def test_batch_matches_single_rows(build: Any) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model = build(family)
    kept = {}
    for only in (None, 0, 1):
        inputs = family.make_inputs(images=(2, 1), only=only)
        with tokenprune.patched(model, Pyramid(), keep=0.5, record=True):
            model.generate(**inputs, max_new_tokens=1)
            kept[only] = [cut.kept for cut in tokenprune.stats(model).cuts]
    rows = family.make_inputs(images=(2, 1))["attention_mask"].argmax(1).tolist()
    for row, start in enumerate(rows):
        assert [cut[row] for cut in kept[None]] == [[start + position for position in cut[0]] for cut in kept[row]]


@torch.no_grad()
def test_budget_after_another_method_counts_remaining_tokens(build: Any) -> None:
    """uniform keeps 18 of 36 tokens. Their average over the layers is 9."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    methods: list[str | Method] = ["uniform", Pyramid()]
    with tokenprune.patched(model, methods, keep=[0.5, 9], record=True):
        model(**inputs)
        tokens = tokenprune.stats(model).visual_tokens_per_layer
    assert tokens[0] == 18 and abs(sum(tokens) / 4 - 9) <= 1


def test_layers_of_cuts_shrink_for_small_budgets() -> None:
    """The layers before the first cut use half of the budget."""
    assert choose_layers((0.25, 0.5), 32, Budget(keep=0.34)) == [8, 16]
    assert choose_layers((0.25, 0.5), 32, Budget(keep=0.25)) == [4, 8]
