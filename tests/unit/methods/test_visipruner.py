# SPDX-License-Identifier: Apache-2.0
"""visipruner against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from several_cuts import best, rows, view
from tests.unit.methods.naive.visipruner import naive_parts
from tokenprune import Budget, BudgetError


def test_layer_by_layer() -> None:
    """Parts that grow and shrink again: one cut, then, at the second calm layer behind it, withdrawal."""
    method = tokenprune.method("visipruner", part=0.5)
    stages = [stage for stage, _ in method.stages(Budget(keep=0.6), 32)]
    assert [stage.cut_layer for stage in stages] == list(range(8, 32))
    counts, keep = [20, 13, 1], [12, 8, 1]
    scales = ([0.001, 0.01, 1.0, 0.001, 1.0, 0.001], [0.001] * 6, [0.001, 0.001, 3.0, 0.001, 0.001, 1.0])
    carry: dict[str, Any] = {}
    found, calm = [False] * 3, [0] * 3
    for number, stage in enumerate(stages[:6]):
        g = torch.Generator().manual_seed(number)
        scale = torch.tensor([row[number] for row in scales])[:, None, None]
        attention = torch.rand(3, 3, 20, generator=g) * scale
        output = torch.randn(3, 3, 4, generator=g) * 4
        tokens = view(counts, keep, method.needs, seed=number, last_row_attention=attention, last_row_output=output,
                      carry=carry)  # fmt: skip
        got = rows(stage.select(tokens).keep)
        carry = dict(tokens.carry)
        for row, count in enumerate(counts):
            lengths, cosines = naive_parts(attention[row, :, :count], tokens.value_heads[row, :count], output[row])
            calm[row] += found[row] and min(cosines) >= 0.999
            want = list(range(count))
            if not found[row] and min(cosines) < 0.995:
                found[row] = True
                want = best(lengths, min(keep[row], max(1, sum(one > 0.5 for one in lengths))))
            assert got[row] == ([] if calm[row] >= 2 else want), (number, row)
    assert found[:2] == [True, False] and calm[0] == 2


def test_what_cannot_be() -> None:
    for budget in (Budget(average_tokens=9), Budget.from_kv_share(0.5), Budget.from_flops_share(0.5)):
        with pytest.raises(BudgetError, match="Pass an upper bound per image"):
            tokenprune.method("visipruner").stages(budget, 32)


@torch.no_grad()
def test_nothing_leaves_where_nothing_matters(build: Any) -> None:
    from zoo import FAMILIES

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    want = model(**inputs).logits
    with tokenprune.patched(model, "visipruner", keep=0.5, turns=-1.0):
        assert torch.equal(model(**inputs).logits, want)
