# SPDX-License-Identifier: Apache-2.0
"""Build the part that reduces tokens in a vision tower."""

from __future__ import annotations

from typing import Any

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.towers.grids import GridTower
from tokenprune.integrations.hf.towers.packed import PackedTower
from tokenprune.integrations.hf.towers.rows import RowTower
from tokenprune.selection.sites.encoder import TowerMethod
from tokenprune.selection.sites.units import UnitDropper


def build_tower_part(
    adapter: Adapter, method: TowerMethod, budget: Budget, processor: Any = None
) -> RowTower | PackedTower | GridTower:
    """Build the part for the vision tower of a model. The part classes list the errors."""
    if adapter.family.tower_rows == "all images":
        return PackedTower(adapter, method, budget, processor)
    if adapter.family.tower_rows == "one image" and isinstance(method, UnitDropper):
        return GridTower(adapter, method, budget)
    return RowTower(adapter, method, budget)
