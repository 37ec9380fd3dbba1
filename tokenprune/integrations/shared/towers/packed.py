# SPDX-License-Identifier: Apache-2.0
"""The layout of towers that lay the patches of all images end to end (Qwen2-VL to Qwen3.5, GLM)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.integrations.shared.towers.packed_features import first_of_group
from tokenprune.integrations.shared.towers.parts import Plan, frames_apart
from tokenprune.integrations.shared.towers.reducer import Layout, TowerReducer
from tokenprune.integrations.shared.towers.rows import check_method
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.unit_dropping import Grids, choosing_packed, come_back, dropping
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher, Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper

Order = Callable[[], Tensor | None]  # returns `TowerRun.order`


class PackedLayout(Layout):
    """Patches of all images lie end to end. A unit, `patches` of them, merges with another of its image, or of its
    frame of a video. Keys are `[n * patches, Dh]`, mean over heads.

    fills: whether a merger gets rows of all units, or brings these back. keep: of a method that merges. shape: what it
    knows of the tower, if others than these facts.

    Raises what `check_method` does, and BudgetError for a budget that cannot be reached.
    """

    def __init__(
        self, tower: Any, method: TowerMethod, fills: bool, keep: Budget | float | int, shape: Tower | None = None
    ) -> None:
        self.method, self.fills, self.side = method, fills, tower.spatial_merge_size
        self.patches = self.side**2
        self.blocks = [Block(block, block.norm2, block.mlp) for block in tower.blocks]
        self.mergers = (tower.merger, *getattr(tower, "deepstack_merger_list", ()))
        if isinstance(method, UnitDropper):
            self.middle = not method.removes
            return
        # How many units an image has, only the image tells: 1 stands for that.
        self.budget = keep if isinstance(keep, Budget) else Budget.of_checked(keep)
        self.shape = Tower(1, 0, len(self.blocks), len(self.blocks), tower) if shape is None else shape
        check_method(method, self.budget, self.shape.unit, shows=False)
        self.proportional, self.middle = method.proportional, True
        method.plan(self.budget, self.shape)  # raises what cannot be reached

    def grids(self, grid_thw: Any) -> Grids:
        """Return (frames, height, width) in units of each image or video. grid_thw: the same in patches."""
        rows = torch.as_tensor(grid_thw, device="cpu").tolist()
        return [(t, h // self.side, w // self.side) for t, h, w in rows]

    # -- a forward

    def begin_merging(self, method: TowerMethod, grids: Grids, order: Tensor | None, device: torch.device) -> TowerRun:
        """Return the state of a forward in which units merge; for `order` see `TowerRun`."""
        sizes = [math.prod(grid) for grid in grids]

        def plan_of_frame(count: int, keep: float | int) -> Plan:
            return method.plan(Budget.of_checked(keep), self.shape.of(count))

        assert self.budget.keep is not None  # see `check_method`
        parts = frames_apart(grids, self.budget.keep, plan_of_frame)
        units = Units.packed(sum(sizes), self.patches, device)
        return TowerRun(units, parts.plan(len(self.blocks)), sizes=sizes, order=order)

    def begin_dropping(
        self, method: UnitDropper, grids: Grids, num_kept: Sequence[int], order: Order, device: torch.device,
        chosen: Tensor | None = None,
    ) -> TowerRun:  # fmt: skip
        """Return the state of a forward in which units leave.

        num_kept: how many units of each image may stay. chosen: which units stay, bool `[units]` on the host, in the
        order of rows, where they were chosen ahead of the tower.
        """
        sizes, depth = [math.prod(grid) for grid in grids], len(self.blocks)
        run = TowerRun(Units.packed(sum(sizes), self.patches, device), [None] * depth, sizes=sizes)
        if chosen is None:
            run.order = order()
            run.drops = choosing_packed(run, method, grids, num_kept, self.patches)
        else:
            run.kept, run.acts = list(chosen.split(sizes)), not bool(chosen.all())
            if run.acts:
                run.order = order()
                run.drops = {method.block(depth): lambda hidden: dropping(chosen, run.order, hidden.device)}
        if run.acts and not method.removes:
            come_back(run, method, method.block(depth), depth, [size * self.patches for size in sizes])
        return run

    def find(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        return match(keys.view(1, run.units.left[0], -1), None)

    # -- the mergers, which turn units into visual tokens

    def attach(self, reducer: TowerReducer) -> None:
        """Put the reducer of this layout around the mergers."""
        for merger in self.mergers:
            if self.fills:
                reducer.around(merger, partial(self._enter_merger, reducer))
            else:
                reducer.around(merger, None, partial(self._leave_merger, reducer), last=True)

    def _enter_merger(self, reducer: TowerReducer, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = reducer.state()
        return ((run.units.full(args[0]), *args[1:]), kwargs) if run is not None and run.acts else None

    def _leave_merger(self, reducer: TowerReducer, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = reducer.state()
        return run.units.full(output) if run is not None and run.acts else None


def first_units(owners: Sequence[Tensor]) -> list[Tensor]:
    """Return for each image of a packed tower, for each of its units, the first that is one with it; long `[units]`.
    owners: see `TowerRun.owners`."""
    units = sum(map(len, owners))  # more than there are groups
    return [first_of_group(of_image[None], units)[0] for of_image in owners]
