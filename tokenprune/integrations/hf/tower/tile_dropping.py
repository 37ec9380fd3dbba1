# SPDX-License-Identifier: Apache-2.0
"""Drop units at the input of a block, in towers whose images or tiles have rows of their own: as many of each, so that
no row is padded. A class token stays."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budget import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.tower.merging import EncoderPatch
from tokenprune.integrations.shared.attachable import hidden_states, states
from tokenprune.integrations.shared.observation import Observation
from tokenprune.integrations.shared.reducer import TowerReducer, TowerRun
from tokenprune.integrations.shared.unit_dropping import choose_units, choosing, come_back
from tokenprune.integrations.shared.units import Units
from tokenprune.ops.merging import Merge
from tokenprune.ops.transfer import to_device
from tokenprune.sites.units import UnitDropper


class TileDrop(EncoderPatch):
    """Has `method` drop units in the tower of `adapter`'s model.

    Raises UnsupportedSetupError for towers that are not known, and in a forward for tiles that are padded; OptionError
    for a block that there is not, or whose output nobody reads.
    """

    def __init__(self, adapter: Adapter, method: UnitDropper, budget: Budget) -> None:
        super().__init__(adapter, method, budget)
        self.merges, self.dropper, self.block = False, method, method.checked_block(self.shape.read)
        self.middle = not method.removes

    def _note_masked(self, run: TowerRun, observation: Observation, mask: Tensor) -> None:
        raise UnsupportedSetupError(
            f"{self.method.name}: some patches of these images are padding, which units that leave would mix with "
            "others; use a method that acts after the tower, such as divprune"
        )

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if index == 0:
            states()[self] = self._begin(hidden_states(args, kwargs))
        return TowerReducer._enter_block(self, index, module, args, kwargs)

    def merge_of(self, index: int, run: TowerRun) -> Merge | None:
        return TowerReducer.merge_of(self, index, run)

    def _begin(self, entered: Tensor) -> TowerRun:
        rows, count = entered.shape[:2]
        run, squares = TowerRun(Units.of(rows, count, entered.device), [None] * len(self.blocks)), self.squares
        shape = self.shape.of(count if squares is None else squares.count(count))
        units, most = shape.patches, shape.left(self.budget)
        side = math.isqrt(units)
        if most >= units:
            return run

        def fold(hidden: Tensor) -> Tensor:
            if squares is None:
                return hidden[:, shape.protected :].reshape(rows * units, 1, -1)
            order = squares.order(count, hidden.device)
            return squares.fold(hidden, order).reshape(rows * units, squares.size, -1)

        def choose(x: Tensor, size: int) -> Merge:
            stays = choose_units(self.dropper, x, [(1, side, units // side)] * rows, [most] * rows, size)
            own = to_device(stays.view(rows, units), x.device)
            if squares is not None:
                run.ordered = True
                merge = Merge.dropping(own, [most] * rows)
                return squares.spread(merge, squares.order(count, x.device))
            first = own.new_ones(rows, shape.protected)
            return Merge.dropping(torch.cat([first, own], dim=1), [most + shape.protected] * rows)

        run.drops = choosing(self.dropper, self.block, fold, choose)
        if not self.dropper.removes:
            come_back(run, self.dropper, self.block, self.shape.read, [count] * rows)
        return run
