# SPDX-License-Identifier: Apache-2.0
"""Dropping units in the tower: outputs that a patch does not change, and unsupported setups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from packed_towers import drawn, tower_of
from tokenprune import BudgetError, OptionError, TokenPruneError


@torch.no_grad()
def test_hidden_states_have_the_full_length(build) -> None:
    family = FAMILIES["qwen2_5_vl"]
    model, inputs = build(family), drawn(family.make_inputs())
    tower = tower_of(model)
    with tokenprune.patched(model, "pixelprune"):
        out = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], output_hidden_states=True)
    assert len(out.last_hidden_state) == len(inputs["pixel_values"])
    assert all(len(x) == len(inputs["pixel_values"]) for x in out.hidden_states or ())


def test_unsupported_setups_raise(build) -> None:
    family = FAMILIES["qwen2_vl"]
    model, inputs = build(family), drawn(family.make_inputs())
    for method, message in (
        (["pixelprune", "tome"], "both act at"), (["pixelprune", "vscan"], "pixelprune drops patches there"),
        (["pixelprune", "evs"], "pixelprune drops some of the tokens"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            tokenprune.patch(model, method, keep=0.5)
    for budget in (tokenprune.Budget(keep=0.5, per="prompt"), tokenprune.Budget.from_flops_share(0.5)):
        with pytest.raises(BudgetError, match="before the prompt is known"):
            tokenprune.patch(model, "pixelprune", keep=budget)
    with torch.no_grad(), tokenprune.patched(model, "pixelprune", keep=tokenprune.Budget(average_tokens=5)):
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == 10


def test_invalid_results_of_a_method_raise(build) -> None:
    class Wrong(tokenprune.selection.UnitDropper):
        name = "wrong"

        def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
            return pixels.sum(-1)

    family = FAMILIES["qwen2_vl"]
    model = build(family)
    inputs = family.make_inputs()
    with tokenprune.patched(model, Wrong(), keep=0.5), pytest.raises(TokenPruneError, match=r"keep_units\(\) must"):
        model(**inputs)
