# SPDX-License-Identifier: Apache-2.0
"""mustdrop: behavior that its naive loop (naive/mustdrop.py) does not cover.

Numbers in docstrings are invariants of the description.
"""

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


def view(keep: list[int], **observed: Any) -> VisualTokens:
    needs = tokenprune.method("mustdrop").needs
    return several_cuts.view(COUNTS, keep, sorted(needs), **observed)


def select_rows(tokens: VisualTokens, **options: Any) -> list[list[int]]:
    return several_cuts.rows(tokenprune.method("mustdrop", **options).select(tokens).keep)


@each("protected", [0.0, 0.08, 0.5])
@each(
    "thresholds", [(0.03, 0.9), (0.02, 0.99), (0.0, 0.5), (0.5, 0.0), (1.0, 1.1), (0.05, 2.0), (0.0, 9.0), (9.0, 0.0)]
)
def test_thresholds_match_loop(thresholds: tuple[float, float], protected: float) -> None:
    for keep in (COUNTS, [12, 5, 1]):
        for seed in range(3):
            tokens = view(keep, seed=seed)
            got = select_rows(tokens, protected=protected, thresholds=thresholds)
            assert got == ties(tokens, 0, protected, thresholds)
            assert all(1 <= len(row) <= k for row, k in zip(got, keep, strict=True))


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
    observed = {name: getattr(tokens, name) for name in ("hidden", "last_row_attention")}
    no_text = visual_tokens(
        counts=COUNTS, keep=[12, 5, 3], text={"mask": torch.zeros(3, 5, dtype=torch.bool)},
        text_sum_and_max=torch.zeros_like(tokens.text_sum_and_max), **observed,
    )  # fmt: skip
    last = tokens.last_row_attention.mean(1)
    segments = zip(last.tolist(), COUNTS, (12, 5, 3), strict=True)
    want = [several_cuts.best(row[:count], keep) for row, count, keep in segments]
    assert select_rows(no_text, protected=0.0) == want


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 10**6])
def test_thresholds_in_a_model(rows: int, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts follow the content and never grow from cut to cut, also with chunked text rows."""
    monkeypatch.setattr(observable_bases, "_MAX_ELEMENTS", rows)
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 1))
    assert tokenprune.method("mustdrop", thresholds=(1.0, 1.0)).chooses_count
    counts = []
    for text_threshold in (0.0, 0.05, 1.0):
        with tokenprune.patched(model, "mustdrop", keep=0.9, thresholds=(0.9, text_threshold), record=True):
            model(**inputs)
            counts.append(tokenprune.stats(model).visual_tokens_out)
            first = tokenprune.stats(model).cuts[0]
        if text_threshold == 0.05:
            maps = model(**inputs, output_attentions=True).attentions[first.layer - 1].mean(1)
            for row, ids in enumerate(inputs["input_ids"]):
                positions = (ids == IMAGE).nonzero().flatten()
                text_positions = torch.arange(int(positions[-1]) + 1, len(ids))
                is_relevant = maps[row, text_positions][:, positions].amax(0) >= text_threshold
                kept = survivors(first, len(ids))[row, positions]
                assert 0 < int(is_relevant.sum()) < len(positions) and kept[is_relevant].all()
                assert int((kept & ~is_relevant).sum()) <= 3  # the key set
    assert counts[0] > counts[1] > counts[2] > 0


@torch.no_grad()
def test_tower_attention_protects_tokens_in_model(build: Any) -> None:
    """3 and 7: the class token's attention in the last read block protects tokens, for any question."""
    family = FAMILIES["llava"]
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 1))
    attentions = model.model.vision_tower(inputs["pixel_values"], output_attentions=True).attentions
    read = len(attentions) + model.config.vision_feature_layer
    score = attentions[read][:, :, 0, 1:].mean(1)
    keys = [row.topk(-(-score.shape[1] // 10)).indices.tolist() for row in score]
    kept_per_question = []
    for token_id in (17, 40):
        inputs["input_ids"][:, -2:] = token_id
        with tokenprune.patched(model, "mustdrop", keep=0.5, protected=0.1, record=True):
            model(**inputs)
            cuts = tokenprune.stats(model).cuts
        for cut in cuts:
            kept = survivors(cut, inputs["input_ids"].shape[1])
            for row, key in enumerate(keys):
                positions = (inputs["input_ids"][row] == IMAGE).nonzero().flatten()
                keys_kept = kept[row, positions[key]]
                assert keys_kept.all() or int(kept[row, positions].sum()) < len(key)
                assert int(kept[row, positions].sum()) > 0
        kept_per_question.append(cuts[0].kept)
    assert kept_per_question[0] != kept_per_question[1]
