# SPDX-License-Identifier: Apache-2.0
"""The layouts of towers whose images or tiles have rows of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, UnsupportedSetupError
from tokenprune.integrations.shared.towers.parts import Plan
from tokenprune.integrations.shared.towers.reducer import Layout
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune.integrations.shared.towers.tile_goals import Goal, parts_of_tiles
from tokenprune.integrations.shared.towers.unit_dropping import choose_units, choosing, come_back
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.encoder import Matcher, Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper


def check_method(method: TowerMethod, budget: Budget, unit: int, shows: bool) -> None:
    """Raise BudgetError for a budget that is neither a share nor a number of tokens, and UnsupportedSetupError for a
    method that reads what the tower does not show.

    unit: patches that become one visual token. shows: whether blocks show more than keys (`EncoderMethod.reads`).
    """
    if budget.keep is None or budget.per != "image":
        raise BudgetError(
            f"{method.name} acts in the encoder, where each image is for itself: keep is a share of its "
            f"patches or a number of them, not {budget}"
        )
    if method.reads and (not shows or unit > 1):
        raise UnsupportedSetupError(
            f"{method.name} drops patches inside the tower by {method.reads}, which takes a CLIP or SigLIP tower "
            "that sees an image as one tile, and each of whose patches becomes a visual token; use a method after "
            "the tower, or leave out the option"
        )


class RowLayout(Layout):
    """Images have rows of their own, `[B, n, D]`; keys are `[B, H, n, Dh]`.

    shape: what the method knows of the tower; its `tokens` are those of an image as the config has it. squares: the
    patches that merge as one, which are tokens to the method; None where each patch is for itself. shows: see
    `check_method`. num_kept: returns how many units of each row may stay; by default what the budget says.

    Raises what `check_method` does, and BudgetError for a budget that cannot be reached.
    """

    begins = True

    def __init__(
        self,
        method: TowerMethod,
        budget: Budget,
        blocks: Sequence[Block],
        shape: Tower,
        squares: Squares | None = None,
        shows: bool = False,
        num_kept: Callable[[int, Tower], Sequence[int]] | None = None,
    ) -> None:
        check_method(method, budget, shape.unit, shows)
        self.method, self.budget, self.blocks, self.shape, self.squares = method, budget, list(blocks), shape, squares
        self.num_kept = self._num_kept if num_kept is None else num_kept
        self.proportional = method.proportional
        self.middle = not (isinstance(method, UnitDropper) and method.removes)
        self.plan(shape.tokens)  # raises what cannot be reached

    def plan(self, count: int) -> Plan:
        """Return the matcher of each block, for `count` tokens that enter; None where a block merges nothing."""
        shape = self.shape if count == self.shape.tokens else self.shape.of(count)
        return self.method.plan(self.budget, shape)

    def begin(self, hidden: Tensor) -> TowerRun:
        rows, count = hidden.shape[:2]
        run = TowerRun(Units.of(rows, count, hidden.device), [None] * len(self.blocks))
        if isinstance(self.method, UnitDropper):
            self._plan_drops(run, self.method, rows, count)
        else:
            self._plan_merges(run, rows, count)
        return run

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

    def _plan_merges(self, run: TowerRun, rows: int, count: int) -> None:
        """Set the plan of a forward with `rows` images, of each of which `count` tokens enter."""
        run.plan = self.plan(count if self.squares is None else self.squares.count(count))

    def _num_kept(self, rows: int, shape: Tower) -> Sequence[int]:
        return [shape.left(self.budget)] * rows

    def _plan_drops(self, run: TowerRun, method: UnitDropper, rows: int, count: int) -> None:
        """Set the drops of a forward: as many units of each row leave, so that no row is padded. Class tokens stay."""
        squares = self.squares or Squares(1, self.shape.protected)
        shape = self.shape.of(count if self.squares is None else squares.count(count))
        units, kept = shape.patches, self.num_kept(rows, shape)
        side = math.isqrt(units)
        if min(kept) >= units:
            return

        def fold(hidden: Tensor) -> Tensor:
            order = squares.order(count, hidden.device)
            return squares.fold(hidden, order).reshape(rows * units, squares.size, -1)

        def choose(x: Tensor, size: int) -> Merge:
            stays = choose_units(method, x, [(1, side, units // side)] * rows, kept, size)
            merge = Merge.dropping(to_device(stays.view(rows, units), x.device), list(kept))
            return squares.spread(merge, squares.order(count, x.device))

        block = method.block(shape.read)
        run.drops = choosing(method, block, fold, choose)
        if not method.removes:
            come_back(run, method, block, shape.read, [count] * rows)


class TileLayout(RowLayout):
    """Tiles have rows, and each may have a goal of its own; see tile_goals.py.

    goals: returns the goals of so many rows; None where the budget is for each row.
    """

    def __init__(
        self,
        method: TowerMethod,
        budget: Budget,
        blocks: Sequence[Block],
        shape: Tower,
        squares: Squares | None,
        goals: Callable[[int], Sequence[Goal] | None],
    ) -> None:
        super().__init__(method, budget, blocks, shape, squares)  # newlines stand between its tokens, and tiles overlap
        self.goals = goals

    def _plan_merges(self, run: TowerRun, rows: int, count: int) -> None:
        goals = self.goals(rows)
        if goals is None or count != self.shape.tokens:
            super()._plan_merges(run, rows, count)
            return
        run.parts = parts_of_tiles(goals, self.shape, partial(self.method.plan, self.budget))
        run.plan = run.parts.plan(len(self.blocks))
