# SPDX-License-Identifier: Apache-2.0
"""Merging inside vision towers, whichever library runs them: what becomes of the units, see reducer.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, UnsupportedSetupError
from tokenprune.integrations.shared.attachable import hidden_states, states
from tokenprune.integrations.shared.towers.packed_features import first_of_group
from tokenprune.integrations.shared.towers.parts import Plan, frames_apart
from tokenprune.integrations.shared.towers.reducer import Block, TowerReducer, TowerRun
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.selection.sites.encoder import Matcher, Tower, TowerMethod


class Merger(TowerReducer):
    """Base of what merges in a tower as `method` says.

    tower: what the method knows of it; its `tokens` are those of an image as the config has it. shows: whether blocks
    show more than keys (`EncoderMethod.reads`).
    Raises BudgetError for a budget that is neither a share nor a number of tokens, or that cannot be reached;
    UnsupportedSetupError for a method that reads what the tower does not show.
    """

    middle = True
    shows = False

    def __init__(self, method: TowerMethod, budget: Budget, blocks: Sequence[Block], tower: Tower) -> None:
        super().__init__()
        if budget.keep is None or budget.per != "image":
            raise BudgetError(
                f"{method.name} acts in the encoder on each image separately and does not support {budget}. Set keep "
                "to a share or a number of patches."
            )
        if method.reads and (not self.shows or tower.unit > 1):
            raise UnsupportedSetupError(
                f"{method.name} drops patches by {method.reads}, which needs a CLIP or SigLIP tower with one tile per "
                "image and one token per patch. Use a method after the tower, or leave out the option."
            )
        self.method, self.budget, self.blocks, self.shape = method, budget, list(blocks), tower
        self.keep, self.proportional = budget.keep, method.proportional
        self.plan(tower.tokens)  # raises what cannot be reached

    def plan(self, count: int) -> Plan:
        """Return the matcher of each block, for `count` tokens that enter; None where a block merges nothing."""
        tower = self.shape if count == self.shape.tokens else self.shape.of(count)
        return self.method.plan(self.budget, tower)

    def merge_of(self, index: int, run: TowerRun) -> Merge | None:
        if (match := run.plan[index]) is None:
            return None
        if run.keys is None:
            raise UnsupportedSetupError(
                f"{self.method.name}: block {index} of the tower did not call its attention function."
            )
        keys, run.keys = run.keys, None
        return self.find(match, keys, run)

    def find(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        """Return the merge of the block that runs, and of which `keys` were noted."""
        raise NotImplementedError


class RowMerger(Merger):
    """Merges in a tower whose images have rows of their own. It is shown keys `[B, H, n, Dh]`.

    squares: the patches that merge as one, which are tokens to the method; None where each patch is for itself.
    """

    def __init__(
        self,
        method: TowerMethod,
        budget: Budget,
        blocks: Sequence[Block],
        tower: Tower,
        squares: Squares | None = None,
    ) -> None:
        self.squares = squares
        super().__init__(method, budget, blocks, tower)

    def plan_of(self, rows: int, count: int) -> Plan:
        """Return the plan of a forward with `rows` images, of each of which `count` tokens enter."""
        return self.plan(count if self.squares is None else self.squares.count(count))

    def _enter_block(self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if index == 0:
            hidden = hidden_states(args, kwargs)
            rows, count = hidden.shape[:2]
            states()[self] = TowerRun(Units.of(rows, count, hidden.device), self.plan_of(rows, count))
        return super()._enter_block(index, module, args, kwargs)

    def find(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        left = run.units.left if run.units.padded else None
        if self.method.reads:
            return match(keys, left)
        keys = keys.float().mean(dim=1)
        if self.squares is None:
            return match(keys, left)
        order = None if run.ordered else self.squares.order(keys.shape[1], keys.device)
        merge = match(self.squares.fold(keys, order), self.squares.left(left))
        if merge is None:
            return None
        run.ordered = True
        return self.squares.spread(merge, order)


class PackedMerger(Merger):
    """Merges in a tower of packed patches, a unit with another of its image, or of its frame of a video. It is shown
    keys `[n * patches, Dh]`, mean over heads.

    patches: in a unit.
    """

    patches: int

    def begin(self, grids: Sequence[Sequence[int]], order: Tensor | None, device: torch.device) -> TowerRun:
        """Return the state of a forward; for `order` see `TowerRun`. grids: (frames, height, width) in units of each
        image or video."""
        sizes = [math.prod(grid) for grid in grids]
        parts = frames_apart(grids, self.keep, self._plan_of_frame)
        units = Units.packed(sum(sizes), self.patches, device)
        return TowerRun(units, parts.plan(len(self.blocks)), sizes=sizes, order=order)

    def _plan_of_frame(self, count: int, keep: float | int) -> Plan:
        return self.method.plan(Budget.of_checked(keep), self.shape.of(count))

    def find(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        return match(keys.view(1, run.units.left[0], -1), None)


def firsts(owners: Sequence[Tensor]) -> list[Tensor]:
    """Return for each image of a packed tower, for each of its units, the first that is one with it; long `[units]`.
    owners: see `TowerRun.owners`."""
    units = sum(map(len, owners))  # more than there are groups
    return [first_of_group(of_image[None], units)[0] for of_image in owners]
