# SPDX-License-Identifier: Apache-2.0
"""Budgets of several cuts: `profile` on made-up decoders, and a method of three cuts in real runs."""

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


def decoder(layers: int, kv_heads: int | tuple[int, ...] = 2) -> DecoderShape:
    return DecoderShape(layers, hidden=64, intermediate=128, heads=4, kv_heads=kv_heads, head_dim=16)


def per_layer(cuts: list, counts: list[int], shape: DecoderShape, text: int = 10) -> list[list[int]]:
    """For each segment its tokens in each layer, as an engine finds them: every cut resolved with what arrives."""
    left, spent = list(counts), [[] for _ in counts]
    by_layer = {cut.layer: cut.budget for cut in cuts}
    for layer in range(shape.layers):
        if layer in by_layer:
            left = by_layer[layer].resolve(left, layer=layer, shape=shape, text_tokens=text, original=counts)
        for tokens, count in zip(spent, left, strict=True):
            tokens.append(count)
    return spent


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
def test_published_schedules_come_out(budget: dict) -> None:
    cuts = plan_cuts(32, PYRAMID, Budget.from_json(budget))
    assert [cut.layer for cut in cuts] == [8, 16, 24]
    (tokens,) = per_layer(cuts, [576], decoder(32))
    assert tokens == [576] * 8 + [288] * 8 + [144] * 8 + [72] * 8


def test_one_token_is_not_all_of_them() -> None:
    """1 and 1.0 are equal, and so are budgets of them: what is remembered of one is not taken for the other."""
    cuts, shape = [(1, 1.0), (2, 0.5)], decoder(8)
    about = dict(shape=shape, text_tokens=3)
    assert Budget(keep=1.0).solve(cuts, [77], **about) == [[77], [77]]
    with pytest.raises(BudgetError, match="layer 1"):
        Budget(tokens=1).solve(cuts, [77], **about)
    assert Budget(tokens=1).solve([(0, 1.0)], [78], **about) == [[1]]
    assert Budget(keep=1.0).solve([(0, 1.0)], [78], **about) == [[78]]


@st.composite
def schedules(draw: Any) -> tuple[int, list[tuple[int, float]]]:
    layers = draw(st.integers(2, 40))
    places = sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1, max_size=5)))
    relative = sorted(draw(st.lists(st.floats(0.01, 5), min_size=len(places), max_size=len(places))), reverse=True)
    return layers, list(zip(places, relative, strict=True))


@settings(deadline=None, max_examples=200)
@given(schedules(), st.lists(st.integers(1, 900), min_size=1, max_size=4), st.floats(0.01, 1), st.data())
def test_the_average_over_layers_is_the_budget(schedule: Any, counts: list[int], share: float, data: Any) -> None:
    """Within one token of every segment, for all kinds of budget; or the budget is out of reach, and is said to be."""
    layers, cuts = schedule
    kv_heads = data.draw(st.one_of(st.integers(1, 4), st.tuples(*[st.integers(1, 4)] * layers)))
    shape, text = decoder(layers, kv_heads), data.draw(st.integers(1, 300))
    kind = data.draw(st.sampled_from(["keep", "int", "average_tokens", "average_share", "kv_share", "flops_share"]))
    shares = ("keep", "average_share", "kv_share")
    tokens = max(1, round(share * max(counts)))
    budget = {"int": Budget(tokens=tokens), "average_tokens": Budget(average_tokens=tokens + share)}.get(kind)
    budget = budget or Budget.from_json({kind: share})
    weights = shape.kv_widths if kind == "kv_share" else [1] * layers
    before = sum(weights[: cuts[0][0]]) / sum(weights)

    def cost(per: list[list[float]]) -> float:
        return shape.prefill_flops([text + sum(column) for column in zip(*per, strict=True)])

    full = cost([[count] * layers for count in counts])
    least = [[count] * cuts[0][0] + [0] * (layers - cuts[0][0]) for count in counts]
    try:
        got = per_layer(plan_cuts(layers, cuts, budget), counts, shape, text)
    except BudgetError as error:
        assert "cannot be reached" in str(error)
        if kind == "flops_share":
            assert cost(least) >= share * full * (1 - 1e-9)
        else:
            asked = [share if kind in shares else min(1, (budget.keep or budget.average_tokens) / n)
                     for n in counts]  # fmt: skip
            assert any(before >= one - 1e-9 for one in asked)
        return
    for count, of_segment in zip(counts, got, strict=True):
        assert all(1 <= after <= before for before, after in zip([count, *of_segment], of_segment, strict=False))
        if kind != "flops_share":
            average = sum(w * n for w, n in zip(weights, of_segment, strict=True)) / sum(weights)
            target = share * count if kind in shares else budget.keep or budget.average_tokens
            assert abs(average - min(target, count)) <= 1
    if kind == "flops_share":
        # A token more or less of every segment is on either side of the target.
        fewer = [[max(0, n - (layer >= cuts[0][0])) for layer, n in enumerate(row)] for row in got]
        more = [[min(c, n + 1) for n in row] for row, c in zip(got, counts, strict=True)]
        assert cost(fewer) <= share * full * (1 + 1e-9) or all(n <= 1 for row in got for n in row[cuts[0][0] :])
        assert cost(more) >= share * full * (1 - 1e-9)


def test_what_cannot_be_a_schedule() -> None:
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


def counts_per_layer(cuts: list, row: int, piece: list[int], layers: int) -> list[int]:
    """Tokens of a piece in each layer, by the record of a run."""
    left, tokens = len(piece), []
    by_layer = {cut.layer: cut for cut in cuts}
    for layer in range(layers):
        if layer in by_layer:
            left = len(set(piece) & set(by_layer[layer].kept[row]))
        tokens.append(left)
    return tokens


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
    # A row without images computes all its FLOPs, whatever is asked for.
    inputs = family.make_inputs(images=(2, 1, 0) if budget.target != "flops_share" else (2, 1))
    most = max(max(row) for row in inputs.counts if row)
    asked = budget.average_tokens or (budget.keep if isinstance(budget.keep, int) else None)
    if method != "vscan" and asked and asked <= most / 4:
        with tokenprune.patched(model, method, keep=keep), pytest.raises(BudgetError, match="layer 1 of 4"):
            model(**inputs)
        return
    with tokenprune.patched(model, method, keep=keep, record=True):
        model(**inputs)
        stats = tokenprune.stats(model)
    if budget.target == "flops_share":
        assert stats.prefill_flops_ratio_tokens == pytest.approx(budget.amount, abs=0.03)
        return
    newlines = family.name in ("llava_next", "llava_onevision")  # which stage 1 of vscan keeps, whatever the budget
    for row, row_pieces in enumerate(pieces(family, inputs)):
        for piece in row_pieces:
            tokens = counts_per_layer(stats.cuts, row, piece, 4)
            target = min(len(piece), asked or budget.amount * len(piece))
            assert abs(sum(tokens) / 4 - target) <= 1 or (newlines and method == "vscan")


@torch.no_grad()
def test_a_batch_gives_what_its_rows_give(build: Any) -> None:
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
        assert [cut[row] for cut in kept[None]] == [[start + place for place in cut[0]] for cut in kept[row]]


@torch.no_grad()
def test_behind_another_method_the_budget_counts_what_that_left(build: Any) -> None:
    """36 tokens, 18 behind uniform: their average over the layers is 9."""
    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs(only=0)
    methods: list[str | Method] = ["uniform", Pyramid()]
    with tokenprune.patched(model, methods, keep=[0.5, 9], record=True):
        model(**inputs)
        tokens = tokenprune.stats(model).visual_tokens_per_layer
    assert tokens[0] == 18 and abs(sum(tokens) / 4 - 9) <= 1


def test_layers_of_cuts_shrink_for_small_budgets() -> None:
    """The layers before the first cut then spend half of the budget."""
    assert choose_layers((0.25, 0.5), 32, Budget(keep=0.34)) == [8, 16]
    assert choose_layers((0.25, 0.5), 32, Budget(keep=0.25)) == [4, 8]
