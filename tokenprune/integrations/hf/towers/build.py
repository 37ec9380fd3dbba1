# SPDX-License-Identifier: Apache-2.0
"""The part of a patch that merges in a vision tower, for each kind of tower."""

from __future__ import annotations

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.towers.merging import EncoderPatch
from tokenprune.integrations.hf.towers.packed import PackedTowerPatch
from tokenprune.integrations.hf.towers.tile_merging import TilePatch
from tokenprune.selection.sites.encoder import EncoderMethod


def tower_patch(adapter: Adapter, method: EncoderMethod, budget: Budget) -> EncoderPatch | PackedTowerPatch:
    """Return the patch for the kind of tower that `adapter`'s model has; see the classes for what they raise."""
    if adapter.family.tower_rows == "all images":
        return PackedTowerPatch(adapter, method, budget)
    return (TilePatch if hasattr(adapter.base, "pack_image_features") else EncoderPatch)(adapter, method, budget)
