# SPDX-License-Identifier: Apache-2.0
"""autoprune against naive loops written from its description."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

import tokenprune
from each import each
from several_cuts import Arrived, check_in_model, rows, view
from tokenprune import Budget
from tokenprune.methods.in_llm.autoprune import compute_mutual_information, compute_retention


def naive_information(attention: list[list[float]]) -> float:
    """Return the mutual information of one head's attention, shape (words, visual tokens), in bits."""
    words = len(attention)
    total = 0.0
    for row in attention:
        for y, weight in enumerate(row):
            joint = weight / words
            marginal = sum(other[y] / words for other in attention)
            total += joint * math.log2(max(1e-6, joint / (marginal / words + 1e-6)))
    return total


def test_mutual_information_matches_formula() -> None:
    g = torch.Generator().manual_seed(0)
    attention = torch.rand(2, 3, 5, 7, generator=g) / 7
    words = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    attention = attention.masked_fill(~words[:, None, :, None], 0)
    got = compute_mutual_information(attention, words)
    for s, num_words in ((0, 5), (1, 3)):
        for h in range(3):
            want = naive_information(attention[s, h, :num_words].tolist())
            assert float(got[s, h]) == pytest.approx(want, abs=1e-5)
    uniform = torch.full((1, 1, 4, 4), 0.25)
    assert abs(float(compute_mutual_information(uniform, torch.ones(1, 4, dtype=torch.bool)))) < 1e-3
    distinct = torch.eye(4)[None, None]  # each word attends to a different token
    assert float(compute_mutual_information(distinct, torch.ones(1, 4, dtype=torch.bool))) == pytest.approx(2, abs=1e-3)


def test_retention_falls_unless_slope_is_zero() -> None:
    for slope in (0.05, 0.2, 0.4):
        curve = [compute_retention(layer, slope) for layer in range(32)]
        assert all(earlier > later for earlier, later in pairwise(curve)) and curve[0] < 0.75
    assert {compute_retention(layer, 0.0) for layer in range(32)} == {0.375}
    assert compute_retention(1e9, 0.4) == pytest.approx(0, abs=1e-9)


@each("cuts", [1, 6, None])
@each("share", [0.1, 0.3, 0.6])
def test_all_slopes_meet_budget(cuts: int | None, share: float) -> None:
    method = tokenprune.method("autoprune", cuts=cuts)
    stages = method.stages(Budget(keep=share), 32)
    layers = [stage.cut_layer for stage, _ in stages]
    assert layers[0] == (2 if share > 0.09 else 1) and len(layers) == {1: 1, 6: 6, None: 30}[cuts]
    average, steep = 300, []
    for slope in (0.0, 0.1, 0.2, 0.4):
        counts = stages[0][0]._plan_counts(576, average, slope)
        assert counts == sorted(counts, reverse=True) and min(counts) >= 1 and max(counts) <= 576
        spans = [end - start for start, end in zip(layers, [*layers[1:], 32], strict=True)]
        spent = sum(span * count for span, count in zip(spans, counts, strict=True))
        assert 0 <= average * sum(spans) - spent <= 32
        steep.append(counts[0])
    assert steep == sorted(steep)  # a steeper slope keeps more tokens at the first cut


def test_question_distributes_budget_over_layers(build: Any) -> None:
    spent: list[tuple[int, int]] = []

    def naive(arrived: Arrived) -> list[int]:
        heads = len(arrived.before)
        if arrived.number == 0:
            bits = (
                32
                * sum(naive_information(head[arrived.text][:, arrived.places].tolist()) for head in arrived.before)
                / heads
            )
            slope = max(0.0, 0.4 - 0.02 * bits)
            average = max(k for k in range(1, 37) if 36 + 3 * k <= 0.5 * 4 * 36 + 1e-9)
            curve = [sum(compute_retention(layer * 8 - 1, slope) for layer in (index,)) for index in (1, 2, 3)]
            best, scale = [0, 0, 0], 0.0
            while sum(counts := [max(1, min(36, round(36 * scale * c))) for c in curve]) <= 3 * average and scale < 1e6:
                best, scale = counts, scale + 0.002 + scale * 1e-4
            assert abs(arrived.keep - best[0]) <= 1
            spent.append((arrived.keep, round(100 * slope)))
        score = {
            i: sum(float(arrived.before[h, j, i]) for h in range(heads) for j in arrived.text) for i in arrived.places
        }
        return sorted(arrived.places, key=lambda i: (-score[i], i))[: arrived.keep]

    check_in_model("autoprune", naive, build, keep=0.5, gamma=0.02)
    assert len({slope for _, slope in spent}) > 1


def test_images_have_separate_counts() -> None:
    method = tokenprune.method("autoprune", gamma=5.0)
    uniform, distinct = torch.full((1, 3, 5, 30), 1 / 30), torch.zeros(1, 3, 5, 30)
    distinct[0, :, range(5), range(5)] = 1.0
    tokens = view([30, 30], [15, 15], method.needs, text_attention=torch.cat([uniform, distinct]))
    carry: dict[str, Any] = {}
    got = []
    for stage, _ in method.stages(Budget(keep=0.5), 32):
        tokens = view([30, 30], [15, 15], method.needs, text_attention=torch.cat([uniform, distinct]), carry=carry)
        got.append([len(row) for row in rows(stage.select(tokens).keep)])
        carry = dict(tokens.carry)
    distinct_counts = [row[1] for row in got]
    assert max(distinct_counts) - min(distinct_counts) <= 1 and got[0][0] > got[-1][0]
