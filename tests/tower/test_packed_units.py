# SPDX-License-Identifier: Apache-2.0
"""Units on their way through a packed tower: arithmetic by hand, and units that leave at the input of any block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from oracle import close
from tests.tower.test_unit_dropping import DIFFERENT, UNIT, drawn, encode, kept_by, masked, tensors_of, tower_of
from tokenprune.integrations.hf.encoded.record import record_of
from tokenprune.integrations.hf.tower.unit_dropping import UnitDrop
from tokenprune.integrations.shared.packed import PackedRun, PackedUnits


def rows(*values: float) -> Tensor:
    """Two patches of each unit, and one number of each patch: its unit's, and ten more."""
    return torch.tensor([[value + patch] for value in values for patch in (0.0, 10.0)])


def test_units_are_dropped_and_merged_in_any_order() -> None:
    cpu = torch.device("cpu")
    units, hidden = PackedUnits.of(5, 2, cpu).keep(torch.tensor([True, False, True, True, True]), rows(0, 1, 2, 3, 4))
    assert torch.equal(hidden, rows(0, 2, 3, 4)) and units.log_weight(torch.float32) is None
    units, hidden = units.merge(torch.tensor([0, 0, 2, 0]), hidden, 2)  # of 0, 2, 3, 4 the first takes two
    assert torch.equal(hidden, rows(2, 3))
    assert torch.equal(units.full(hidden), torch.tensor([[2.0], [12], [0], [0], [2], [12], [3], [13], [2], [12]]))
    assert torch.equal(units.log_weight(torch.float32), torch.tensor([3.0, 3, 1, 1]).log())
    units, hidden = units.keep(torch.tensor([False, True]), hidden)
    assert (units.kept.tolist(), units.owner.tolist(), units.weight.tolist()) == ([3], [-1, -1, -1, 0, -1], [1.0])
    assert torch.equal(units.full(torch.tensor([[7.0]])), torch.tensor([[0.0], [0], [0], [7], [0]]))
    assert torch.equal(units.full(torch.ones(10, 1)), torch.ones(10, 1))  # what has a row for each patch


def test_borders_are_those_of_the_units_that_are_left() -> None:
    units = PackedUnits.of(6, 2, torch.device("cpu"))
    ends = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    left, places = units.keep(torch.tensor([True, False, False, True, True, False]), rows(*range(6)))
    assert left.borders(ends).tolist() == [0, 2, 6]  # the second piece is empty
    assert left.borders(ends).dtype == ends.dtype
    assert torch.equal(left.rows(rows(*range(6))), places)


@pytest.mark.parametrize("layer", [1, -1])
@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_units_that_leave_at_a_block_equal_the_tower_masked_from_there(
    name: str, layer: int, build, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = FAMILIES[name]
    model, inputs = build(family), drawn(family.make_inputs(images=(2, 1)))
    tower, start = tower_of(model), UnitDrop.start
    layer %= len(tower.blocks)

    def later(self: UnitDrop, *args: Any) -> PackedRun:
        run = start(self, *args)
        run.drops = {layer: run.drops[0]}
        return run

    monkeypatch.setattr(UnitDrop, "start", later)
    kept = kept_by(tokenprune.method("pixelprune"), inputs)["image"]
    units, left = sum(map(len, kept)), int(torch.cat(kept).sum())
    with tokenprune.patched(model, "pixelprune"):
        got = encode(model, inputs)["image"]
        out = tower(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"], output_hidden_states=True)
    counts = [UNIT * units] * layer + [UNIT * left] * (len(tower.blocks) - layer)
    assert record_of(got).block_tokens == counts
    last = units if name == "glm4v" else UNIT * units  # GLM gives what its convolution makes of them
    assert [len(x) for x in out.hidden_states] == [UNIT * units] * len(tower.blocks) + [last]
    with masked(tower, inputs["image_grid_thw"], kept, layer):
        want = encode(model, inputs)["image"]
    for mine, theirs in zip(tensors_of(got), tensors_of(want), strict=True):
        close(mine[torch.cat(kept)], theirs[torch.cat(kept)])
