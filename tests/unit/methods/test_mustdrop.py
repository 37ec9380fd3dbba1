# SPDX-License-Identifier: Apache-2.0
"""mustdrop beyond its loop: thresholds, protected tokens, counts; the numbers refer to the invariants of its
description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import several_cuts
import tokenprune
from each import each
from oracle import survivors
from several_cuts import counts_of
from tests.unit.methods.naive.mustdrop import ties
from tokenprune import Budget, VisualTokens
from tokenprune.selection import observable_bases
from tokenprune.testing import visual_tokens
from zoo import FAMILIES, IMAGE

COUNTS = [40, 17, 9]


def view(keep: list[int], **given: Any) -> VisualTokens:
    needs = tokenprune.method("mustdrop").needs
    return several_cuts.view(COUNTS, keep, sorted(needs), **given)


def kept(tokens: VisualTokens, **options: Any) -> list[list[int]]:
    return several_cuts.rows(tokenprune.method("mustdrop", **options).select(tokens).keep)


@each("protected", [0.0, 0.08, 0.5])
@each(
    "thresholds", [(0.03, 0.9), (0.02, 0.99), (0.0, 0.5), (0.5, 0.0), (1.0, 1.1), (0.05, 2.0), (0.0, 9.0), (9.0, 0.0)]
)
def test_thresholds_match_loop(thresholds: tuple[float, float], protected: float) -> None:
    for keep in (COUNTS, [12, 5, 1]):
        for seed in range(3):
            tokens = view(keep, seed=seed)
            got = kept(tokens, protected=protected, thresholds=thresholds)
            assert got == ties(tokens, 0, protected, thresholds)
            assert all(1 <= len(row) <= most for row, most in zip(got, keep, strict=True))


@pytest.mark.parametrize("keep", [1 / 3, 0.22, 0.6, 192, Budget(average_tokens=128)])
def test_counts_fall_by_constant_ratio(keep: Any) -> None:
    cuts = counts_of(tokenprune.method("mustdrop"), 32, 576, keep)
    layers, counts = map(list, zip(*cuts, strict=True))
    assert len(cuts) == 4 and counts == sorted(counts, reverse=True)
    if not isinstance(keep, Budget):
        assert layers == [3, 7, 11, 15] or keep == 0.22
    runs = [b - a for a, b in zip(layers, [*layers[1:], 32], strict=True)]
    spent = layers[0] * 576 + sum(run * count for run, count in zip(runs, counts, strict=True))
    want = keep.average_tokens if isinstance(keep, Budget) else keep if isinstance(keep, int) else keep * 576
    assert abs(spent / 32 - want) <= 1
    if isinstance(keep, float):
        ratios = [b / a for a, b in zip([576, *counts], counts, strict=False)]
        assert max(ratios) - min(ratios) < 0.02


def test_last_token_rates_without_text() -> None:
    tokens = view([12, 5, 3])
    given = {name: getattr(tokens, name) for name in ("hidden", "last_row_attention")}
    alone = visual_tokens(
        counts=COUNTS, keep=[12, 5, 3], text={"mask": torch.zeros(3, 5, dtype=torch.bool)},
        text_sum_and_max=torch.zeros_like(tokens.text_sum_and_max), **given,
    )  # fmt: skip
    last = tokens.last_row_attention.mean(1)
    each = zip(last.tolist(), COUNTS, (12, 5, 3), strict=True)
    want = [several_cuts.best(row[:count], keep) for row, count, keep in each]
    assert kept(alone, protected=0.0) == want


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 10**6])
def test_thresholds_in_a_model(rows: int, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts follow the content and never grow from cut to cut, also with chunked text rows."""
    monkeypatch.setattr(observable_bases, "_MAX_ELEMENTS", rows)
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 1))
    assert tokenprune.method("mustdrop", thresholds=(1.0, 1.0)).chooses_count
    counts = []
    for word in (0.0, 0.05, 1.0):
        with tokenprune.patched(model, "mustdrop", keep=0.9, thresholds=(0.9, word), record=True):
            model(**inputs)
            counts.append(tokenprune.stats(model).visual_tokens_out)
            first = tokenprune.stats(model).cuts[0]
        if word == 0.05:
            maps = model(**inputs, output_attentions=True).attentions[first.layer - 1].mean(1)
            for row, ids in enumerate(inputs["input_ids"]):
                places = (ids == IMAGE).nonzero().flatten()
                behind = torch.arange(int(places[-1]) + 1, len(ids))
                passes = maps[row, behind][:, places].amax(0) >= word
                left = survivors(first, len(ids))[row, places]
                assert 0 < int(passes.sum()) < len(places) and left[passes].all()
                assert int((left & ~passes).sum()) <= 3  # the key set
    assert counts[0] > counts[1] > counts[2] > 0


@torch.no_grad()
def test_tower_attention_protects_tokens_in_model(build: Any) -> None:
    """3 and 7: by the class token's row in the last block that is read; no question changes that."""
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 1))
    seen = model.model.vision_tower(inputs["pixel_values"], output_attentions=True).attentions
    read = len(seen) + model.config.vision_feature_layer
    score = seen[read][:, :, 0, 1:].mean(1)
    keys = [row.topk(-(-score.shape[1] // 10)).indices.tolist() for row in score]
    kept_of = []
    for word in (17, 40):
        inputs["input_ids"][:, -2:] = word
        with tokenprune.patched(model, "mustdrop", keep=0.5, protected=0.1, record=True):
            model(**inputs)
            cuts = tokenprune.stats(model).cuts
        for cut in cuts:
            left = survivors(cut, inputs["input_ids"].shape[1])
            for row, key in enumerate(keys):
                places = (inputs["input_ids"][row] == IMAGE).nonzero().flatten()
                stays = left[row, places[key]]
                assert stays.all() or int(left[row, places].sum()) < len(key)
                assert int(left[row, places].sum()) > 0
        kept_of.append(cuts[0].kept)
    assert kept_of[0] != kept_of[1]
