# SPDX-License-Identifier: Apache-2.0
"""Made-up dymu thresholds for the tower of a model."""

from __future__ import annotations

from typing import Any

import torch

import tokenprune
from tokenprune.selection import Tower
from tokenprune_bench.calibration import Thresholds


def tower_shape(model: Any) -> Tower:
    from tokenprune.integrations.hf.families import get_adapter
    from tokenprune.integrations.hf.towers.rows import RowTower

    return RowTower(
        get_adapter(model), tokenprune.method("tome", r=0), tokenprune.Budget(keep=0.5)
    ).reducer.layout.shape


def by_hand(model: Any, values: list[float]) -> Thresholds:
    return Thresholds({0.5: torch.tensor(values)}, tower_shape(model).fingerprint, 1)


# With these thresholds, the images of `mixed` keep different numbers of tokens.
TAUS = {"llava": [0.6, 0.7, 1.0], "llava_next": [0.6, 0.7, 1.0], "llava_onevision": [0.6, 0.7, 0.75]}
