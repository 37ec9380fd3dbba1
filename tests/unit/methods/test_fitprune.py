# SPDX-License-Identifier: Apache-2.0
"""fitprune against naive loops written from its description, and the fit of its recipe."""

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
def test_average_share_is_met(rows: Any, share: float) -> None:
    shares = compute_layer_shares(rows, 4, share)
    assert shares[0] == 1 and sum(shares) / 4 == pytest.approx(share, abs=1e-6)
    assert all(earlier >= later - 1e-12 for earlier, later in pairwise(shares))
    if rows and share == 0.65:
        assert shares == pytest.approx(ROWS[1])
    if not rows and share < 1:
        assert shares[1] / shares[0] == pytest.approx(shares[3] / shares[2])


def test_counts_follow_the_recipe(tmp_path: Path) -> None:
    recipe = Recipe(torch.tensor(ROWS), 0, "model")
    recipe.save(tmp_path / "r.safetensors")
    method = tokenprune.method("fitprune", recipe=tmp_path / "r.safetensors")
    budgets = (Budget(keep=0.65), Budget(average_share=0.65), Budget.from_kv_share(0.65))
    for budget in (*budgets, Budget(average_tokens=65), Budget(keep=65)):
        assert [count for _, count in counts_of(method, 4, 100, budget)] == [80, 40, 40]
    with pytest.raises(OptionError, match="has 4 layers, but the decoder has 5"):
        method.stages(Budget(keep=0.65), 5)
    for budget in (Budget(keep=0.2), Budget(average_share=0.2), Budget.from_flops_share(0.5)):
        with pytest.raises(BudgetError, match=r"fitprune|is too low"):
            method.stages(budget, 4)


def naive_shares(attention: list[list[list[float]]], loss: float) -> list[float]:
    """Return the share of kept tokens per layer. attention: per layer, the scores from image and text, per token."""
    count = len(attention[0][0])
    kept, shares = list(range(count)), [1.0]
    for layer in attention:
        droppable = []
        for row in layer:
            order, dropped = sorted(kept, key=lambda i: (row[i], i)), []
            while order and sum(row[i] for i in order[1:]) >= (1 - loss) * sum(row) - 1e-12:
                dropped.append(order.pop(0))
            droppable.append(set(dropped))
        kept = [i for i in kept if not (i in droppable[0] and i in droppable[1])]
        shares.append(len(kept) / count)
    return shares


def test_layer_limits() -> None:
    g = torch.Generator().manual_seed(0)
    attention = [torch.rand(2, 25, generator=g, dtype=torch.float64) ** 3 for _ in range(5)]
    before = [1.0] * 6
    for loss in (0.0, 0.02, 0.1, 0.3, 0.7, 0.98):
        shares = compute_kept_shares(attention, loss)
        assert shares == pytest.approx(naive_shares([layer.tolist() for layer in attention], loss))
        assert shares[1] <= before[1]  # monotone in the first layer
        before = shares


@torch.no_grad()
def test_fit_writes_recipe(build: Any, tmp_path: Path) -> None:
    family = FAMILIES["llava"]
    model, path = build(family), tmp_path / "recipe.safetensors"
    samples = [family.make_inputs(images=(2, 1)), family.make_inputs(images=(1,), seed=1)]
    recipe = fit_fitprune(model, samples, path)
    assert recipe.table.shape == (51, 4) and recipe.table[0].min() > 0.9
    eager, images = build(family, "eager"), []
    for sample in samples:
        maps = [x.amax(1) for x in eager(**sample, output_attentions=True).attentions[:3]]
        attention_mask = sample["attention_mask"].bool()
        for row, visual in enumerate(family.visual_mask(eager, sample)):
            for tokens in visual.nonzero().flatten().split(36):
                text = [
                    i for i in range(len(visual)) if i > int(tokens[-1]) and attention_mask[row, i] and not visual[i]
                ]
                images.append([[x[row][tokens][:, tokens].mean(0).tolist(), x[row][text][:, tokens].mean(0).tolist()]
                               for x in maps])  # fmt: skip
    for step in (0, 5, 20, 40):
        want = torch.tensor([naive_shares(image, step / 50) for image in images]).mean(0)
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
