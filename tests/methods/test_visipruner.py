# SPDX-License-Identifier: Apache-2.0
"""visipruner against naive loops written from its description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from several_cuts import Arrived, best, check_in_model, rows, view
from tokenprune import Budget, BudgetError, OptionError


def naive_parts(attention: Tensor, values: Tensor, output: Tensor) -> tuple[list[float], list[float]]:
    """attention: `[H, n]`; values: `[n, Hkv, D]`; output: `[H, D]`. Lengths of the parts, and cosines without them."""
    heads, count = attention.shape
    whole = output.double().flatten()
    lengths, cosines = [], []
    for j in range(count):
        part = torch.stack(
            [attention[h, j].double() * values[j, h * values.shape[1] // heads].double() for h in range(heads)]
        )
        left = whole - part.flatten()
        lengths.append(float(part.norm()))
        cosines.append(float(left @ whole / (left.norm() * whole.norm())))
    return lengths, cosines


@pytest.mark.parametrize("part", [0.0, 0.1, 1e6])
def test_the_layer_at_which_they_matter(part: float, build: Any) -> None:
    def naive(seen: Arrived) -> list[int]:
        attention = seen.before[:, seen.last]
        heads = len(attention)
        values = seen.values.repeat_interleave(heads // seen.values.shape[1], 1)
        output = torch.stack([attention[h] @ values[:, h] for h in range(heads)])
        lengths, cosines = naive_parts(attention[:, seen.places], seen.values[seen.places], output)
        assert min(cosines) < 0.995  # else nothing would have been cut here
        number = min(round(0.5 * len(seen.places)), max(1, sum(one > part for one in lengths)))
        return [seen.places[i] for i in best(lengths, number)]

    (cut,) = check_in_model("visipruner", naive, build, keep=0.5, part=part)
    assert cut.layer == 3


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
    for budget in (Budget(average_tokens=9), Budget(kv_share=0.5), Budget(flops_share=0.5)):
        with pytest.raises(BudgetError, match="most that stay"):
            tokenprune.method("visipruner").stages(budget, 32)
    for options in (dict(turns=1.5), dict(part=-1), dict(part=True)):
        with pytest.raises(OptionError, match="visipruner"):
            tokenprune.method("visipruner", **options)


@torch.no_grad()
def test_nothing_leaves_where_nothing_matters(build: Any) -> None:
    from zoo import FAMILIES

    family = FAMILIES["llava"]
    model, inputs = build(family), family.make_inputs()
    want = model(**inputs).logits
    with tokenprune.patched(model, "visipruner", keep=0.5, turns=-1.0):
        assert torch.equal(model(**inputs).logits, want)
