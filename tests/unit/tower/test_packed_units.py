# SPDX-License-Identifier: Apache-2.0
"""The state of units in a packed tower: arithmetic by hand, and units dropped at the input of any block."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tokenprune
from families import FAMILIES
from oracle import close
from tests.unit.tower.test_packed_encoder import order_of_windows
from tests.unit.tower.test_unit_dropping import DIFFERENT, UNIT, drawn, encode, kept_by, masked, tensors_of, tower_of
from tokenprune import OptionError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.integrations.shared.towers.parts import build_merge
from tokenprune.integrations.shared.towers.reducer import TowerRun
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.testing import ConformanceError, check_method


def rows(*values: float) -> Tensor:
    """Return two patches per unit with one value each: the unit's index, and the index plus ten."""
    return torch.tensor([[value + patch] for value in values for patch in (0.0, 10.0)])


def dropping(*stays: bool) -> Merge:
    return Merge.from_kept(torch.tensor([stays]), [sum(stays)])


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
    left, hidden = units.apply(dropping(True, False, False, True, True, False), rows(*range(6)))
    assert left.compute_cu_seqlens(ends).tolist() == [0, 2, 6]  # the second sequence is empty
    assert left.compute_cu_seqlens(ends).dtype == ends.dtype
    assert torch.equal(left.select_patches(rows(*range(6))), hidden)


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
    """The output of each block is expanded to all patches, with zeros for dropped units."""
    drops = {1: lambda hidden: dropping(True, False, True, True), 2: lambda hidden: dropping(True, True, False)}
    run = TowerRun(Units.from_packed(4, 2, torch.device("cpu")), [None] * 3, drops, [4])
    states, given = [rows(1, 2, 3, 4)], {"cu_seqlens": torch.tensor([0, 8]), "max_seqlen": 8}
    for index in range(3):
        states.append(run.enter(index, states[-1], proportional=False))
        changed = run.update_arguments(given)
    assert run.counts == [[4], [3], [2]]
    assert changed["cu_seqlens"].tolist() == [0, 4] and changed["max_seqlen"] == 4
    none = torch.zeros(2, 1)
    one, three = rows(1), rows(3)
    want = [states[0], states[0], torch.cat([one, none, rows(3, 4)]), torch.cat([one, none, three, none])]
    output = SimpleNamespace(hidden_states=tuple(states))
    run.restore_states(output)
    assert all(map(torch.equal, output.hidden_states, want))


@dataclass(frozen=True)
class Loudest(tokenprune.selection.UnitDropper):
    """Keep the units with the largest hidden states at the input of block `at` (from the end if negative)."""

    name: ClassVar[str] = "loudest"
    sees: ClassVar[str] = "hidden"
    chooses_count: ClassVar[bool] = False
    at: int = 0

    def block(self, depth: int) -> int:
        return self.at if self.at >= 0 else depth + self.at

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        norm = pixels.norm(dim=-1)
        keep = torch.zeros(norm.numel(), dtype=torch.bool)
        keep[norm.flatten().topk(most).indices] = True
        return keep.view_as(norm)


@dataclass(frozen=True)
class Fewer(Loudest):
    """Keep one unit, whatever the budget."""

    def keep_units(self, pixels: Tensor, most: int) -> Tensor:
        return super().keep_units(pixels, 1)


@dataclass(frozen=True)
class Some(Fewer):
    """Declare that the content decides the number of kept units."""

    chooses_count: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("name", "at"), [(name, at) for name in DIFFERENT for at in (0, 1, 2, -1) if (name, at) != ("glm4v", 2)]
)  # it has two blocks
@torch.no_grad()
def test_dropped_units_match_tower_masked_from_the_block(name: str, at: int, build) -> None:
    """A method that selects by hidden states sees the states of its block, in raster order."""
    family, method = FAMILIES[name], Loudest(at)
    model, inputs, seen = build(family), drawn(family.make_inputs(images=(2, 1))), []
    tower, grids = tower_of(model), inputs["image_grid_thw"]
    layer = method.block(len(tower.blocks))
    handle = tower.blocks[layer].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    encode(model, inputs)
    handle.remove()
    entered = seen[0].view(-1, UNIT, seen[0].shape[-1])[in_rows(tower, grids)].flatten(0, 1)
    shown = {"pixel_values": entered, "image_grid_thw": grids}
    kept = kept_by(method, shown, lambda units: round(0.4 * units))["image"]
    units, left = sum(map(len, kept)), int(torch.cat(kept).sum())
    with tokenprune.patched(model, method, keep=0.4):
        got = encode(model, inputs)["image"]
        out = tower(inputs["pixel_values"], grid_thw=grids, output_hidden_states=True)
        model(**inputs)
        assert tokenprune.stats(model).visual_tokens_out == left
    assert all(map(torch.equal, get_record(got).kept, kept))
    assert get_record(got).block_tokens == [UNIT * units] * layer + [UNIT * left] * (len(tower.blocks) - layer)
    last = units if name == "glm4v" else UNIT * units  # GLM returns the output of its convolution
    assert [len(x) for x in out.hidden_states] == [UNIT * units] * len(tower.blocks) + [last]
    with masked(tower, grids, kept, layer):
        want = encode(model, inputs)["image"]
    for mine, theirs in zip(tensors_of(got), tensors_of(want), strict=True):
        close(mine[torch.cat(kept)], theirs[torch.cat(kept)])


@pytest.mark.parametrize("name", DIFFERENT)
@torch.no_grad()
def test_keeping_all_units_changes_no_output(name: str, build) -> None:
    """keep=1.0 does not act. A budget above the size of every image runs the method and is bit-equal."""
    family = FAMILIES[name]
    model, inputs = build(family), drawn(family.make_inputs(images=(2, 1)))
    want = model(**inputs).logits
    for keep in (1.0, 10**4):
        with tokenprune.patched(model, Loudest(1), keep=keep):
            assert torch.equal(model(**inputs).logits, want)


def in_rows(tower: Any, grids: Tensor) -> Tensor:
    """Return the raster index of each unit in the sequence of a tower."""
    order, start = [], 0
    for t, h, w in grids.tolist():
        side = tower.window_size // 2 // tower.patch_size if hasattr(tower, "window_size") else max(h, w)
        for _ in range(t):
            order += [start + unit for unit in order_of_windows(h // 2, w // 2, side)]
            start += h * w // UNIT
    return torch.tensor(order).argsort()


def test_method_inside_the_tower_conforms(build) -> None:
    check_method(Loudest(1))
    with pytest.raises(OptionError, match="block 9 is out of range: the vision tower has 4"):
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), Loudest(9), keep=0.5)
    assert find_unserved_reason(Loudest(0)) is None and find_unserved_reason(tokenprune.method("pixelprune")) is None
    check_method(Some())
    assert "the number of kept tokens depends on the content" in find_unserved_reason(Some())
    with pytest.raises(ConformanceError, match=r"keeps 1 of \d+, not (\d+) to \1"):
        check_method(Fewer())
