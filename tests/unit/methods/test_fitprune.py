# SPDX-License-Identifier: Apache-2.0
"""fitprune against naive loops written from its description, and how its recipe is fitted."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tokenprune
from each import each
from several_cuts import counts_of
from tokenprune import Budget, BudgetError, OptionError
from tokenprune.methods.in_llm.fitprune import Recipe, compute_layer_shares
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune_bench.calibration import fit_fitprune
from tokenprune_bench.calibration.attention_fitting import compute_kept_shares
from zoo import FAMILIES

ROWS = [(1.0, 1.0, 1.0, 1.0), (1.0, 0.8, 0.4, 0.4), (1.0, 0.5, 0.1, 0.0)]


@each("rows", [(), ROWS])
@each("share", [0.26, 0.3, 0.4, 0.65, 0.9, 1.0])
def test_any_average_is_met(rows: Any, share: float) -> None:
    left = compute_layer_shares(rows, 4, share)
    assert left[0] == 1 and sum(left) / 4 == pytest.approx(share, abs=1e-6)
    assert all(one >= later - 1e-12 for one, later in pairwise(left))
    if rows and share == 0.65:
        assert left == pytest.approx(ROWS[1])
    if not rows and share < 1:
        assert left[1] / left[0] == pytest.approx(left[3] / left[2])


def test_counts_follow_the_recipe(tmp_path: Path) -> None:
    recipe = Recipe(torch.tensor(ROWS), 0, "model")
    recipe.save(tmp_path / "r.safetensors")
    method = tokenprune.method("fitprune", recipe=tmp_path / "r.safetensors")
    budgets = (Budget(keep=0.65), Budget(average_share=0.65), Budget.from_kv_share(0.65))
    for budget in (*budgets, Budget(average_tokens=65), Budget(keep=65)):
        assert [number for _, number in counts_of(method, 4, 100, budget)] == [80, 40, 40]
    with pytest.raises(OptionError, match="has 4 layers, but the decoder has 5"):
        method.stages(Budget(keep=0.65), 5)
    for budget in (Budget(keep=0.2), Budget(average_share=0.2), Budget.from_flops_share(0.5)):
        with pytest.raises(BudgetError, match=r"fitprune|is too low"):
            method.stages(budget, 4)


def naive_left(attention: list[list[list[float]]], loss: float) -> list[float]:
    """attention: of each layer, by the image and by the text, of each token."""
    count = len(attention[0][0])
    alive, left = list(range(count)), [1.0]
    for layer in attention:
        can_go = []
        for row in layer:
            order, goes = sorted(alive, key=lambda i: (row[i], i)), []
            while order and sum(row[i] for i in order[1:]) >= (1 - loss) * sum(row) - 1e-12:
                goes.append(order.pop(0))
            can_go.append(set(goes))
        alive = [i for i in alive if not (i in can_go[0] and i in can_go[1])]
        left.append(len(alive) / count)
    return left


def test_what_can_go_of_each_layer() -> None:
    g = torch.Generator().manual_seed(0)
    attention = [torch.rand(2, 25, generator=g, dtype=torch.float64) ** 3 for _ in range(5)]
    before = [1.0] * 6
    for loss in (0.0, 0.02, 0.1, 0.3, 0.7, 0.98):
        left = compute_kept_shares(attention, loss)
        assert left == pytest.approx(naive_left([one.tolist() for one in attention], loss))
        assert left[1] <= before[1]  # monotone in the first layer
        before = left


@torch.no_grad()
def test_fitting(build: Any, tmp_path: Path) -> None:
    family = FAMILIES["llava"]
    model, path = build(family), tmp_path / "recipe.safetensors"
    samples = [family.make_inputs(images=(2, 1)), family.make_inputs(images=(1,), seed=1)]
    recipe = fit_fitprune(model, samples, path)
    assert recipe.table.shape == (51, 4) and recipe.table[0].min() > 0.9
    eager, images = build(family, "eager"), []
    for sample in samples:
        maps = [one.amax(1) for one in eager(**sample, output_attentions=True).attentions[:3]]
        real = sample["attention_mask"].bool()
        for row, visual in enumerate(family.visual_mask(eager, sample)):
            for own in visual.nonzero().flatten().split(36):
                text = [i for i in range(len(visual)) if i > int(own[-1]) and real[row, i] and not visual[i]]
                images.append([[one[row][own][:, own].mean(0).tolist(), one[row][text][:, own].mean(0).tolist()]
                               for one in maps])  # fmt: skip
    for step in (0, 5, 20, 40):
        want = torch.tensor([naive_left(one, step / 50) for one in images]).mean(0)
        assert (recipe.table[step] - want).abs().max() <= 1 / 36 / len(images) + 1e-6
    with tokenprune.patched(model, "fitprune", keep=0.5, recipe=path):
        model(**samples[0])
        assert tokenprune.stats(model).visual_tokens_average == pytest.approx(54, abs=3)
    other = build(FAMILIES["llava_next"])
    with pytest.raises(OptionError, match="another model"):
        tokenprune.patch(other, "fitprune", recipe=path)
    assert recipe.model == compute_fingerprint(model.get_submodule(family.decoder))
    with pytest.raises(OptionError, match="fit fitprune"):
        tokenprune.method("fitprune", recipe=tmp_path / "missing.safetensors")
