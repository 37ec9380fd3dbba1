# SPDX-License-Identifier: Apache-2.0
"""Budget arithmetic, and the number of tokens that remain in the sequence and in the cache."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch

import tokenprune
from basics import MODEL_METHODS, SINGLE_CUT, at_the_decoder, pieces
from each import each
from tokenprune import Budget, BudgetError
from tokenprune.budgets.checks import TARGETS
from tokenprune.models.decoder_shape import DecoderShape
from zoo import FAMILIES, Family

AMBIGUOUS = r"Pass 1\.0.*Budget\(tokens=1\)"

SHAPE = DecoderShape(layers=4, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4)


def test_kv_share_with_different_layers() -> None:
    """Layers before a cut are weighted by their cached bytes per token: (3 + 1 r) / 4 = 0.8 of the bytes."""
    shape = DecoderShape(layers=2, hidden=8, intermediate=16, heads=4, kv_heads=(3, 1), head_dim=4)
    assert Budget.from_kv_share(0.8).resolve([100], layer=1, shape=shape, text_tokens=5) == [20]
    assert Budget(average_tokens=80).resolve([100], layer=1, shape=shape, text_tokens=5) == [60]
    with pytest.raises(BudgetError, match=r"spend 0\.750"):
        Budget.from_kv_share(0.7).resolve([100], layer=1, shape=shape, text_tokens=5)


@each(
    ("budget", "layer", "counts", "kept"),
    [
        (Budget(keep=0.25), 2, [36, 100, 1], [9, 25, 1]),
        (Budget(keep=0.5), 0, [3, 5, 7], [2, 2, 4]),  # Python's round: halves go to the even number
        (Budget(keep=1e-9), 0, [36, 2], [1, 1]),
        (Budget(keep=1.0), 2, [36, 2], [36, 2]),
        (Budget(keep=12), 2, [36, 12, 5], [12, 12, 5]),
        (Budget(tokens=1), 2, [36, 5], [1, 1]),
        # (K + (T - K) r) / T = average: (2 + 2 r) / 4 = 24 / 36, so r = 1 / 3.
        (Budget(average_tokens=24), 2, [36], [12]),
        (Budget(average_tokens=24), 0, [36, 96], [24, 24]),
        (Budget(average_tokens=24), 3, [26], [18]),  # (3 + r) / 4 = 12 / 13, so r = 9 / 13
        (Budget(average_tokens=40), 2, [36, 40, 60], [36, 40, 20]),  # (2 + 2 r) / 4 = 40 / 60
        (Budget(average_share=2 / 3), 2, [36, 12], [12, 4]),  # (2 + 2 r) / 4 = 2 / 3
        (Budget(average_share=0.25), 0, [36, 10], [9, 2]),
        (Budget(average_share=1.0), 2, [36], [36]),
        (Budget.from_kv_share(0.75), 2, [36, 10], [18, 5]),
        (Budget.from_kv_share(0.25), 0, [36, 10], [9, 2]),
        (Budget.from_kv_share(1.0), 2, [36], [36]),
        (Budget.from_flops_share(1.0), 2, [36], [36]),
    ],
)
def test_resolve(budget: Budget, layer: int, counts: list[int], kept: list[int]) -> None:
    assert budget.resolve(counts, layer=layer, shape=SHAPE, text_tokens=10) == kept


@each("layer", [0, 1, 3])
@each("share", [0.9, 0.97])
def test_flops_share(layer: int, share: float) -> None:
    (kept,) = Budget.from_flops_share(share).resolve([100], layer=layer, shape=SHAPE, text_tokens=20)

    def cost(tokens: int) -> float:
        return SHAPE.prefill_flops([120] * layer + [20 + tokens] * (4 - layer)) / SHAPE.prefill_flops([120] * 4)

    # No other integer is closer to the share.
    assert abs(cost(kept) - share) <= min(abs(cost(kept - 1) - share), abs(cost(kept + 1) - share)) + 1e-9


@pytest.mark.parametrize(
    "budget",
    [
        Budget.from_kv_share(0.5),
        Budget.from_kv_share(0.3),
        Budget(average_tokens=50),
        Budget(average_share=0.5),
        Budget.from_flops_share(0.2),
    ],
    ids=str,
)
def test_unreachable_budget_is_rejected(budget: Budget) -> None:
    with pytest.raises(BudgetError, match="at layer 2"):
        budget.resolve([100], layer=2, shape=SHAPE, text_tokens=10)


@each("keep", [0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, -math.inf, True, False, "0.5", [], 1j])
def test_invalid_keep_is_rejected(keep: Any, build) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(BudgetError, match="keep"):
        tokenprune.patch(model, "fastv", keep=keep)
    assert not tokenprune.is_patched(model)


UNUSABLE = [10**400, -(10**400), math.nan, math.inf, True, "x", [1]]


@each(
    "fields",
    [
        {},
        dict(keep=0.5, kv_share=0.5),
        dict(average_tokens=24, average_share=0.5),
        dict(average_share=0),
        dict(average_share=1.01),
        dict(average_share=math.nan),
        dict(keep=0.5, per="batch"),
        *({target: value} for target in ("average_share", "kv_share", "flops_share") for value in UNUSABLE),
        *({target: value} for target in ("keep", "average_tokens") for value in UNUSABLE[1:]),
        dict(average_tokens=0),
        dict(average_tokens=math.inf),
        dict(average_tokens=True),
        dict(kv_share=1.01),
        dict(kv_share=-1),
        dict(flops_share=0),
        dict(flops_share="1"),
    ],
)
def test_invalid_budget_is_rejected(fields: dict) -> None:
    with pytest.raises(BudgetError):
        Budget.from_json({name: value for name, value in fields.items() if name != "per"}, fields.get("per", "image"))


JSON_VALUES = [
    (0.25, Budget(keep=0.25), "keep", 0.25),
    (64, Budget(keep=64), "tokens", 64),
    (1.0, Budget(keep=1.0), "keep", 1.0),
    ({"tokens": 1}, Budget(tokens=1), "tokens", 1),
    ({"average_tokens": 192}, Budget(average_tokens=192), "average_tokens", 192),
    ({"average_share": 0.3}, Budget(average_share=0.3, per="prompt"), "average_share", 0.3),
    ({"kv_share": 0.3}, Budget.from_kv_share(0.3, per="prompt"), "kv_share", 0.3),
    ({"flops_share": 0.5}, Budget.from_flops_share(0.5), "flops_share", 0.5),
    ({"per_second": 20}, Budget.per_second(20, per="frame"), "per_second", 20),
    ({"per_second": 20, "fps": 2.0}, Budget.per_second(20, fps=2.0), "per_second", 20),
    ({"frames": [64, 16, 0.5]}, Budget.by_frame((64, 16, 0.5)), "frames", (64, 16, 0.5)),
    ({"keep": 0.25, "frame_weights": [3, 1, 1]}, Budget.by_frame_weights(0.25, (3, 1, 1)), "keep", 0.25),
    ({"tokens": 1, "frame_weights": [3, 1]}, Budget.by_frame_weights(Budget(tokens=1), (3, 1)), "tokens", 1),
    ({"keep": 0.5, "age": [[0, 1.0], [2, 0.5]], "step": 4}, Budget.by_age(0.5, ((0, 1.0), (2, 0.5)), step=4), "keep",
     0.5),
    ({"tokens": 1, "age": [[0, 1.0], [2, 1]], "step": 1}, Budget.by_age(Budget(tokens=1), ((0, 1.0), (2, 1))),
     "tokens", 1),
    (0.4, Budget(keep=0.4, per="frame"), "keep", 0.4),
]  # fmt: skip


@each(("value", "budget", "target", "amount"), JSON_VALUES)
def test_json_repr_and_copies_are_equal_to_the_budget(value: Any, budget: Budget, target: str, amount: Any) -> None:
    assert (budget.target, budget.amount) == (target, amount)
    assert budget.to_json() == value and Budget.from_json(value, budget.per) == budget
    for copy in (eval(repr(budget)), dataclasses.replace(budget), Budget(**budget.init_values())):
        assert copy == budget and hash(copy) == hash(budget) and copy.amount == amount
    assert not isinstance(value, dict) or budget.format_short() == repr(budget)


def test_budget_has_eight_arguments() -> None:
    assert len(inspect.signature(Budget).parameters) == 8
    # error messages quote the repr
    assert repr(Budget(average_tokens=192, per="prompt")) == "Budget(average_tokens=192, per='prompt')"
    budget = Budget(tokens=64, per="prompt")
    assert budget.keep == budget.tokens == 64
    assert dataclasses.replace(budget, keep=0.125, tokens=None) == Budget(keep=0.125, per="prompt")
    assert Budget.by_frame(torch.tensor([4, 8])) == Budget.by_frame([4, 8]) == Budget.by_frame((4, 8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        budget.keep = 0.5


def test_share_and_count_budgets_differ() -> None:
    budgets = [Budget(tokens=1), Budget(keep=1.0), *(Budget.from_json({name: 1.0}) for name in TARGETS[2:-1])]
    assert len({*budgets}) == len(budgets) == 7
    assert Budget(keep=4) == Budget(tokens=4) != Budget(average_tokens=4)


def test_numpy_numbers_are_accepted(build) -> None:
    numpy = pytest.importorskip("numpy")
    counts = dict(layer=0, shape=SHAPE, text_tokens=1)
    assert Budget.from_keep(numpy.float32(0.5)).resolve([10], **counts) == [5]
    assert Budget.from_keep(numpy.int64(3)).resolve([10], **counts) == [3]
    assert Budget.from_keep(numpy.float64(1.0)).is_identity() and not Budget(tokens=numpy.int64(1)).is_identity()
    with pytest.raises(BudgetError, match=AMBIGUOUS):
        Budget.from_keep(numpy.int64(1))


# -- in a model --------------------------------------------------------------------------------------------------------


def run_patched(model: Any, method: Any, keep: Any, inputs: Any, generate: bool = False) -> tuple[Any, Any]:
    with torch.no_grad(), tokenprune.patched(model, method, keep=keep, record=True):
        out = model.generate(**inputs, max_new_tokens=1) if generate else model(**inputs)
        return out, tokenprune.stats(model)


BUDGETS = {
    "share": (0.3, "image", lambda n: max(1, round(0.3 * n))),
    "tiny": (0.001, "image", lambda n: 1),
    "number": (7, "image", lambda n: min(7, n)),
    "prompt share": (Budget(keep=0.3, per="prompt"), "prompt", lambda n: max(1, round(0.3 * n))),
    "prompt number": (Budget(keep=25, per="prompt"), "prompt", lambda n: min(25, n)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("method", SINGLE_CUT)
@pytest.mark.parametrize("budget", BUDGETS)
def test_kept_counts(method: str, budget: str, family: Family, model) -> None:
    keep, per, expected = BUDGETS[budget]
    inputs = family.make_inputs(images=(2, 1))
    out, stats = run_patched(model, at_the_decoder(method), keep, inputs)
    (cut,) = stats.cuts
    segments = pieces(family, inputs, per)
    for row, row_pieces in enumerate(segments):
        kept, visual = set(cut.kept[row]), {token_index for piece in row_pieces for token_index in piece}
        assert [len(kept & set(piece)) for piece in row_pieces] == [expected(len(piece)) for piece in row_pieces]
        text = set(inputs["attention_mask"][row].nonzero().flatten().tolist()) - visual
        assert kept - visual == text
        assert cut.kept[row] == sorted(kept)
    info = tokenprune.method_info(method)
    before, after = sum(map(sum, inputs.counts)), sum(expected(len(piece)) for row in segments for piece in row)
    ((stage, _),) = tokenprune.method(method).stages(Budget.from_keep(keep), 4)
    layer = stage.cut_layer
    assert (cut.site, cut.layer, cut.method) == (info.site.name, layer, method)
    assert stats.visual_tokens_per_layer == [before] * layer + [after] * (4 - layer)
    assert stats.visual_tokens_average == pytest.approx((before * layer + after * (4 - layer)) / 4)
    assert stats.keep_ratio == after / before
    assert (stats.visual_tokens_in, stats.visual_tokens_out) == (before, after)
    # FLOPs by hand: before the cut all rows have the padded width, after it the width of the longest row.
    shape, length = DecoderShape.from_config(model.config.get_text_config()), inputs["input_ids"].shape[1]
    width = max(len(kept) for kept in cut.kept)
    expected_ratio = shape.prefill_flops([length] * layer + [width] * (4 - layer)) / shape.prefill_flops([length] * 4)
    assert stats.prefill_flops_ratio == pytest.approx(expected_ratio)
    # Layers before the cut cache all tokens, later layers cache the widest row, up to the sliding window.
    for index, cache_layer in enumerate(out.past_key_values.layers):
        tokens = length if index < layer else width
        window = cache_layer.sliding_window - 1 if getattr(cache_layer, "is_sliding", False) else tokens
        assert cache_layer.keys.shape[-2] == cache_layer.values.shape[-2] == min(tokens, window)
    assert stats.kv_bytes < stats.kv_bytes_full or budget == "prompt number"
    assert out.past_key_values.get_seq_length() == length


@pytest.mark.pairwise
@pytest.mark.parametrize("method", MODEL_METHODS)
@pytest.mark.parametrize(
    "batch",
    [dict(images=(2, 1)), dict(images=(0, 1, 3), padding="right"), dict(padding=None)],
    ids=["left", "right", "no padding"],
)
def test_batch_keeps_the_same_counts_as_single_rows(method: str, batch: dict, family: Family, model) -> None:
    # A plain forward without position_ids counts padding as positions in most families, and keys (so DART's norms, too)
    # rotate with the position. generate() sets position_ids.
    inputs = family.make_inputs(**batch)
    together = run_patched(model, method, 0.3, inputs, generate=True)[1].cuts[-1].kept
    for row, is_real in enumerate(inputs["attention_mask"].bool()):
        if not inputs.counts[row]:
            assert together[row] == is_real.nonzero().flatten().tolist()
            continue
        cuts = run_patched(model, method, 0.3, family.make_inputs(**batch, only=row), generate=True)[1].cuts
        # A content-dependent method may keep all tokens.
        single_row = cuts[-1].kept[0] if cuts else range(int(is_real.sum()))
        start = int(is_real.long().argmax())
        assert together[row] == [start + token_index for token_index in single_row]


@pytest.mark.few_families
@pytest.mark.parametrize("method", MODEL_METHODS)
def test_cache_grows_by_one_token_per_step(method: str, family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 2))
    out, stats = run_patched(model, method, 0.3, inputs)
    prefill = [layer.keys.shape[-2] for layer in out.past_key_values.layers]
    with tokenprune.patched(model, method, keep=0.3):
        cache = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True).past_key_values
        after = tokenprune.stats(model)
    for cache_layer, before in zip(cache.layers, prefill, strict=True):
        window = cache_layer.sliding_window - 1 if getattr(cache_layer, "is_sliding", False) else before + 3
        assert cache_layer.keys.shape[-2] == min(before + 3, window)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 3
    # Statistics cover the prefill. Decoding steps do not change them unless the method acts there.
    assert after.visual_tokens_per_layer == stats.visual_tokens_per_layer
    assert after.prefill_flops_ratio == stats.prefill_flops_ratio
    if tokenprune.method_info(method).site is not tokenprune.Site.DECODE:
        assert after.kv_bytes == stats.kv_bytes


def build_early_method(method: str) -> tokenprune.Method:
    """Return the method with an early cut, so that the four layers of a tiny model can save tokens."""
    return tokenprune.method(method, **({"layer": 2} if tokenprune.method(method).cut_layer > 2 else {}))


@each(
    ("budget", "average"),
    [(Budget(average_tokens=24), 24 / 36), (Budget(average_share=0.6), 0.6), (Budget.from_kv_share(0.6), 0.6)],
)
@pytest.mark.parametrize("method", MODEL_METHODS)
def test_targets_are_met_in_a_model(method: str, budget: Budget, average: float, build) -> None:
    model = build(FAMILIES["llava"])  # images of 36 tokens
    if tokenprune.method_info(method).cls.chooses_count:
        try:
            tokenprune.method(method).stages(budget, 4)
        except BudgetError as error:  # the method does not support average targets
            assert method in str(error)
            return
    stats = run_patched(model, build_early_method(method), budget, FAMILIES["llava"].make_inputs())[1]
    actual = stats.visual_tokens_average / stats.visual_tokens_in
    if tokenprune.method_info(method).cls.min_tokens:
        assert actual == pytest.approx(average, abs=1 / 36)
    else:  # to the nearest of four layers
        assert average - 1 / 4 < actual <= average


@pytest.mark.parametrize("method", SINGLE_CUT)
@each("batch", [dict(only=0), dict(padding=None), dict(rows=3, padding=None)])
def test_flops_target_is_met_in_a_model(method: str, batch: dict, build) -> None:
    family = FAMILIES["llava"]
    stats = run_patched(
        build(family), build_early_method(method), Budget.from_flops_share(0.75), family.make_inputs(**batch)
    )[1]
    assert stats.prefill_flops_ratio == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("name", ["llava", "llava_next"])
def test_each_image_of_a_prompt_has_its_own_budget(name: str, build) -> None:
    """The images are adjacent, so only the encoder's output separates them."""
    family = FAMILIES[name]
    inputs = family.make_inputs(images=(3,))
    ids, visual = inputs["input_ids"][0], inputs["input_ids"][0] == 3
    order = torch.cat([(~visual).nonzero()[:4], visual.nonzero(), (~visual).nonzero()[4:]]).flatten()
    inputs["input_ids"] = ids[order][None]
    keep = 12 / 36
    (cut,) = run_patched(build(family), "fastv", keep, inputs)[1].cuts
    counts = [sum(token_index in cut.kept[0] for token_index in piece) for piece in pieces(family, inputs)[0]]
    assert counts == [max(1, round(keep * n)) for n in inputs.counts[0]]


def test_statistics(build) -> None:
    model, inputs = FAMILIES["qwen2_vl"].prepare(build)
    with tokenprune.patched(model, "dart", keep=0.25):
        assert repr(tokenprune.stats(model)) == "Stats(no visual tokens seen)"
        model.generate(**inputs, max_new_tokens=2)
        stats = tokenprune.stats(model)
    assert stats.cuts == []  # record=False
    assert 0 < stats.overhead_ms < 60_000
    assert 0 < stats.prefill_flops_ratio < 1
    values = stats.as_dict()
    assert values["visual_tokens_average"] == stats.visual_tokens_average
    assert {"visual_tokens_in", "visual_tokens_out", "visual_tokens_per_layer", "keep_ratio", "prefill_flops_ratio",
            "kv_bytes", "kv_bytes_full", "overhead_ms", "cuts"} <= values.keys()  # fmt: skip
    text = repr(stats)
    assert f"{stats.visual_tokens_in} -> {stats.visual_tokens_out}" in text and "KV" in text
