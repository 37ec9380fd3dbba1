# SPDX-License-Identifier: Apache-2.0
"""The state of units in a packed tower: arithmetic by hand, and units dropped at the input of any block."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.integrations.shared.towers.parts import build_merge
from tokenprune.integrations.shared.towers.reducer import TowerRun
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.selection import UnitDropper
from tokenprune.testing import ConformanceError, check_method


def rows(*values: float) -> Tensor:
    """Return two patches per unit with one value each: the unit's index, and the index plus ten."""
    return torch.tensor([[value + patch] for value in values for patch in (0.0, 10.0)])


def dropping(*kept: bool) -> Merge:
    return Merge.from_kept(torch.tensor([kept]), [sum(kept)])


def test_units_are_dropped_and_merged_in_any_order() -> None:
    units = Units.from_packed(5, 2, torch.device("cpu"))
    units, hidden = units.apply(dropping(True, False, True, True, True), rows(0, 1, 2, 3, 4))
    assert torch.equal(hidden, rows(0, 2, 3, 4)) and units.compute_bias(True, torch.float32) is None
    merge = build_merge(torch.tensor([[0, 0, 2, 0]]), [4], [2])  # out of 0, 2, 3, 4; the first absorbs two
    units, hidden = units.apply(merge, hidden)
    assert torch.equal(hidden, rows(2, 3))
    assert torch.equal(units.expand(hidden), torch.tensor([[2.0], [12], [0], [0], [2], [12], [3], [13], [2], [12]]))
    assert torch.equal(units.compute_bias(True, torch.float32).flatten(), torch.tensor([3.0, 3, 1, 1]).log())
    units, hidden = units.apply(dropping(False, True), hidden)
    assert (units.kept.tolist(), units.owner.tolist(), units.weight.tolist()) == ([3], [[-1, -1, -1, 0, -1]], [[1.0]])
    assert torch.equal(units.expand(torch.tensor([[7.0]])), torch.tensor([[0.0], [0], [0], [7], [0]]))
    assert torch.equal(units.expand(torch.ones(10, 1)), torch.ones(10, 1))  # already one row per patch


def test_cu_seqlens_of_kept_units() -> None:
    units = Units.from_packed(6, 2, torch.device("cpu"))
    ends = torch.tensor([0, 4, 6, 12], dtype=torch.int32)
    kept, hidden = units.apply(dropping(True, False, False, True, True, False), rows(*range(6)))
    assert kept.compute_cu_seqlens(ends).tolist() == [0, 2, 6]  # the second sequence is empty
    assert kept.compute_cu_seqlens(ends).dtype == ends.dtype
    assert torch.equal(kept.select_patches(rows(*range(6))), hidden)


def test_rows_of_any_tower_are_dropped_and_merged() -> None:
    """The second of two rows keeps fewer units. It is padded, and padding has zero weight."""
    x = torch.arange(8.0).view(2, 4, 1)
    units, hidden = Units.from_rows(2, 4, x.device).apply(
        build_merge(torch.tensor([[0, 1, 0, 3], [0, 1, 1, 0]]), [4, 4], [3, 2]), x
    )
    assert units.num_units == [3, 2] and units.has_padding and not units.is_complete
    assert torch.equal(hidden[0].flatten(), torch.tensor([1.0, 1, 3]))
    assert torch.equal(hidden[1, :2].flatten(), torch.tensor([5.5, 5.5]))
    assert torch.equal(units.weight, torch.tensor([[2.0, 1, 1], [2, 2, 0]]))
    assert torch.equal(units.compute_bias(False, x.dtype)[:, 0, 0], torch.tensor([[0.0, 0, 0], [0, 0, -torch.inf]]))
    assert torch.equal(units.expand(hidden).flatten(), torch.tensor([1.0, 1, 1, 3, 5.5, 5.5, 5.5, 5.5]))
    units, hidden = units.apply(
        Merge.from_kept(torch.tensor([[False, True, True], [True, False, False]]), [2, 1]), hidden
    )
    assert torch.equal(units.expand(hidden).flatten(), torch.tensor([0.0, 1, 0, 3, 5.5, 0, 0, 5.5]))


def test_units_are_dropped_at_several_blocks() -> None:
    drops = {1: lambda hidden: dropping(True, False, True, True), 2: lambda hidden: dropping(True, True, False)}
    run = TowerRun(Units.from_packed(4, 2, torch.device("cpu")), [None] * 3, drops, [4])
    states, arguments = [rows(1, 2, 3, 4)], {"cu_seqlens": torch.tensor([0, 8]), "max_seqlen": 8}
    for index in range(3):
        states.append(run.enter(index, states[-1], proportional=False))
        changed = run.update_arguments(arguments)
    assert run.counts == [[4], [3], [2]]
    assert changed["cu_seqlens"].tolist() == [0, 4] and changed["max_seqlen"] == 4
    zeros = torch.zeros(2, 1)
    first, third = rows(1), rows(3)
    want = [states[0], states[0], torch.cat([first, zeros, rows(3, 4)]), torch.cat([first, zeros, third, zeros])]
    output = SimpleNamespace(hidden_states=tuple(states))
    run.restore_states(output)
    assert all(map(torch.equal, output.hidden_states, want))


@dataclass(frozen=True)
class First(UnitDropper):
    """Keep the first unit at the input of the first block for every budget."""

    name: ClassVar[str] = "first"
    sees: ClassVar[str] = "hidden"
    chooses_count: ClassVar[bool] = False

    def block(self, depth: int) -> int:
        return 0

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        keep = torch.zeros(pixels.shape[:3], dtype=torch.bool)
        keep[0, 0, 0] = True
        return keep


@dataclass(frozen=True)
class FirstByContent(First):
    """Declare that the content decides the number of kept units."""

    chooses_count: ClassVar[bool] = True


def test_number_of_units_is_the_budget_unless_the_content_decides() -> None:
    with pytest.raises(ConformanceError, match=r"keeps 1 of \d+, not (\d+) to \1"):
        check_method(First())
    check_method(FirstByContent())
    assert "the number of kept tokens depends on the content" in find_unserved_reason(FirstByContent())
