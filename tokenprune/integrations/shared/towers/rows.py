# SPDX-License-Identifier: Apache-2.0
"""Layouts of towers with one image or tile per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, UnsupportedSetupError
from tokenprune.integrations.shared.towers.parts import Plan
from tokenprune.integrations.shared.towers.reducer import TowerLayout
from tokenprune.integrations.shared.towers.run import Block, TowerRun
from tokenprune.integrations.shared.towers.squares import Squares
from tokenprune.integrations.shared.towers.tile_goals import Goal, build_tile_matcher
from tokenprune.integrations.shared.towers.unit_dropping import add_restoration, choose_units, plan_drops
from tokenprune.integrations.shared.towers.units import Units
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.sites.encoder import Matcher, Tower, TowerMethod
from tokenprune.selection.sites.units import UnitDropper


def check_method(method: TowerMethod, budget: Budget, unit: int, shows: bool) -> None:
    """Check a method and its budget against a tower.

    Args:
        unit: Number of patches that become one visual token.
        shows: Whether blocks provide more observables than keys (`EncoderMethod.reads`).

    Raises:
        BudgetError: If the budget is neither a share nor a number of tokens per image.
        UnsupportedSetupError: If the method reads an observable that the tower does not provide.
    """
    if budget.keep is None or budget.per != "image":
        raise BudgetError(
            f"{method.name} acts in the encoder on each image separately and does not support {budget}. Set keep "
            "to a share or a number of patches."
        )
    if method.reads and (not shows or unit > 1):
        raise UnsupportedSetupError(
            f"{method.name} drops patches by {method.reads}, which needs a CLIP or SigLIP tower with one tile per "
            "image and one token per patch. Use a method after the tower, or leave out the option."
        )


class RowLayout(TowerLayout):
    """Layout of a tower with one image per row: hidden states `[B, n, D]`, attention keys `[B, H, n, Dh]`.

    Args:
        method: Method that merges or drops units in the tower.
        budget: Share or number of tokens per image.
        blocks: Blocks of the tower.
        shape: Sizes of the tower. `shape.tokens` follows from the image size in the config.
        squares: Squares of patches that become one visual token. None if each patch becomes a visual token.
        shows: Whether blocks provide more observables than keys, see `check_method`.
        num_kept: Function of the number of rows and the tower that returns the number of kept units of each row, for
            methods that drop units. By default the number follows from the budget.

    Raises:
        BudgetError: If the budget is neither a share nor a number of tokens per image, or cannot be reached.
        UnsupportedSetupError: See `check_method`.
    """

    starts_at_first_block = True

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
        self.acts_mid_block = not (isinstance(method, UnitDropper) and method.removes)
        self.plan(shape.tokens)  # raises for a budget that cannot be reached

    def plan(self, count: int) -> Plan:
        """Return the matcher of each block for `count` tokens per row, or None for a block without merges."""
        shape = self.shape if count == self.shape.tokens else self.shape.with_tokens(count)
        return self.method.plan(self.budget, shape)

    def begin(self, hidden: Tensor) -> TowerRun:
        rows, count = hidden.shape[:2]
        run = TowerRun(Units.from_rows(rows, count, hidden.device), [None] * len(self.blocks))
        if isinstance(self.method, UnitDropper):
            self._plan_drops(run, self.method, rows, count)
        else:
            self._plan_merges(run, rows, count)
        return run

    def find_merge(self, match: Matcher, keys: Tensor, run: TowerRun) -> Merge | None:
        left = run.units.num_units if run.units.has_padding else None
        if self.method.reads:
            return match(keys, left)
        keys = keys.float().mean(dim=1)
        if self.squares is None:
            return match(keys, left)
        order = None if run.ordered else self.squares.build_order(keys.shape[1], keys.device)
        merge = match(self.squares.fold(keys, order), self.squares.to_unit_counts(left))
        if merge is None:
            return None
        run.ordered = True
        return self.squares.spread(merge, order)

    def _plan_merges(self, run: TowerRun, rows: int, count: int) -> None:
        """Set the matchers of a forward with `rows` images of `count` tokens."""
        run.plan = self.plan(count if self.squares is None else self.squares.count_units(count))

    def _num_kept(self, rows: int, shape: Tower) -> Sequence[int]:
        return [shape.count_kept(self.budget)] * rows

    def _plan_drops(self, run: TowerRun, method: UnitDropper, rows: int, count: int) -> None:
        """Set the drops of a forward. All rows lose the same number of units, and class tokens are kept."""
        squares = self.squares or Squares(1, self.shape.protected)
        shape = self.shape.with_tokens(count if self.squares is None else squares.count_units(count))
        units, num_kept = shape.patches, self.num_kept(rows, shape)
        side = math.isqrt(units)
        if min(num_kept) >= units:
            return

        def fold(hidden: Tensor) -> Tensor:
            order = squares.build_order(count, hidden.device)
            return squares.fold(hidden, order).reshape(rows * units, squares.size, -1)

        def choose(x: Tensor, size: int) -> Merge:
            kept_units = choose_units(method, x, [(1, side, units // side)] * rows, num_kept, size)
            merge = Merge.from_kept(to_device(kept_units.view(rows, units), x.device), list(num_kept))
            return squares.spread(merge, squares.build_order(count, x.device))

        block = method.block(shape.blocks_read)
        run.drops = plan_drops(method, block, fold, choose)
        if not method.removes:
            add_restoration(run, method, block, shape.blocks_read, [count] * rows)


class TileLayout(RowLayout):
    """One tile per row, each with its own number of kept patches; see tile_goals.py.

    Args:
        goals: Returns the goals of all rows, given their number; None if the budget applies to each row.
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
        # A method reads no observables here: newlines separate the tokens of an image, and tiles overlap.
        super().__init__(method, budget, blocks, shape, squares)
        self.goals = goals

    def _plan_merges(self, run: TowerRun, rows: int, count: int) -> None:
        goals = self.goals(rows)
        if goals is None or count != self.shape.tokens:
            super()._plan_merges(run, rows, count)
            return
        run.parts = build_tile_matcher(goals, self.shape, partial(self.method.plan, self.budget))
        run.plan = run.parts.plan(len(self.blocks))
