# SPDX-License-Identifier: Apache-2.0
"""Layout of towers that pack the patches of all images into one sequence (Qwen2-VL to Qwen3.5, GLM)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.integrations.shared.towers.packed_features import find_first_of_group
from tokenprune.integrations.shared.towers.parts import Plan, build_frame_matcher
from tokenprune.integrations.shared.towers.reducer import TowerLayout, TowerReducer
from tokenprune.integrations.shared.towers.rows import check_method
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.unit_dropping import Grids, add_restoration, build_drop, plan_packed_drops
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher, Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper

Order = Callable[[], Tensor | None]  # returns `TowerRun.order`


class PackedLayout(TowerLayout):
    """Patches of all images in one sequence. Units merge within an image, or within a frame of a video.

    Attention keys are `[n * patches, Dh]`, mean over the heads.

    Args:
        fills: Whether all units are restored before the mergers. If not, their outputs are expanded.
        keep: Budget of a method that merges.
        shape: Facts about the tower for a method that merges; by default derived from `tower`.

    Raises:
        BudgetError: If the budget has another form, or cannot be reached.
        UnsupportedSetupError: See `check_method`.
    """

    def __init__(
        self, tower: Any, method: TowerMethod, fills: bool, keep: Budget | float | int, shape: Tower | None = None
    ) -> None:
        self.method, self.fills, self.side = method, fills, tower.spatial_merge_size
        self.patches = self.side**2
        self.blocks = [Block(block, block.norm2, block.mlp) for block in tower.blocks]
        self.mergers = (tower.merger, *getattr(tower, "deepstack_merger_list", ()))
        if isinstance(method, UnitDropper):
            self.acts_mid_block = not method.removes
            return
        # 1 is a placeholder: the number of units depends on the image.
        self.budget = keep if isinstance(keep, Budget) else Budget.from_number(keep)
        self.shape = Tower(1, 0, len(self.blocks), len(self.blocks), tower) if shape is None else shape
        check_method(method, self.budget, self.shape.unit, shows=False)
        self.proportional, self.acts_mid_block = method.proportional, True
        method.plan(self.budget, self.shape)  # raises for a budget that cannot be reached

    def to_unit_grids(self, grid_thw: Any) -> Grids:
        """Convert the grids of images and videos, (frames, height, width), from patches to units."""
        rows = torch.as_tensor(grid_thw, device="cpu").tolist()
        return [(frames, height // self.side, width // self.side) for frames, height, width in rows]

    # -- a forward

    def begin_merging(self, method: TowerMethod, grids: Grids, order: Tensor | None, device: torch.device) -> TowerRun:
        """Return the state of a forward that merges units. For `order` see `TowerRun`."""
        sizes = [math.prod(grid) for grid in grids]

        def build_plan(count: int, keep: float | int) -> Plan:
            return method.plan(Budget.from_number(keep), self.shape.with_tokens(count))

        assert self.budget.keep is not None  # see `check_method`
        parts = build_frame_matcher(grids, self.budget.keep, build_plan)
        units = Units.from_packed(sum(sizes), self.patches, device)
        return TowerRun(units, parts.plan(len(self.blocks)), sizes=sizes, order=order)

    def begin_dropping(
        self, method: UnitDropper, grids: Grids, num_kept: Sequence[int], order: Order, device: torch.device,
        chosen: Tensor | None = None,
    ) -> TowerRun:  # fmt: skip
        """Return the state of a forward that drops units.

        Args:
            grids: (frames, height, width) of each image or video, in units.
            num_kept: Maximum number of kept units of each image.
            order: Returns `TowerRun.order`. Only called if units are dropped.
            chosen: Mask of the kept units, if they were chosen before the tower: shape (units,), bool, on the host, in
                raster order.
        """
        sizes, depth = [math.prod(grid) for grid in grids], len(self.blocks)
        run = TowerRun(Units.from_packed(sum(sizes), self.patches, device), [None] * depth, sizes=sizes)
        if chosen is None:
            run.order = order()
            run.drops = plan_packed_drops(run, method, grids, num_kept, self.patches)
        else:
            run.kept, run.is_active = list(chosen.split(sizes)), not bool(chosen.all())
            if run.is_active:
                run.order = order()
                run.drops = {method.block(depth): lambda hidden: build_drop(chosen, run.order, hidden.device)}
        if run.is_active and not method.removes:
            add_restoration(run, method, method.block(depth), depth, [size * self.patches for size in sizes])
        return run

    def find_merge(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        return match(keys.view(1, run.units.num_units[0], -1), None)

    # -- mergers: the modules that turn units into visual tokens

    def attach(self, reducer: TowerReducer) -> None:
        """Expand the inputs or outputs of the mergers to all units."""
        for merger in self.mergers:
            if self.fills:
                reducer.add_hooks(merger, partial(self._enter_merger, reducer))
            else:
                reducer.add_hooks(merger, None, partial(self._leave_merger, reducer), last=True)

    def _enter_merger(self, reducer: TowerReducer, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        run = reducer.get_run()
        return ((run.units.expand(args[0]), *args[1:]), kwargs) if run is not None and run.is_active else None

    def _leave_merger(self, reducer: TowerReducer, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        run = reducer.get_run()
        return run.units.expand(output) if run is not None and run.is_active else None


def find_first_units(owners: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each image of a packed tower, the index of the first unit in the group of each unit.

    Args:
        owners: Group of each unit; see `TowerRun.get_owners`.

    Returns:
        One int64 tensor per image, shape (units,).
    """
    num_groups = sum(map(len, owners))  # upper bound
    return [find_first_of_group(owner[None], num_groups)[0] for owner in owners]
