# SPDX-License-Identifier: Apache-2.0
"""The table of model families: one row a family, one row a vision tower, and the models that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenprune.models.families.refused import REFUSED, REFUSED_IN_VLLM, UNCUT
from tokenprune.models.families.row import OLDEST, Family, Vllm
from tokenprune.models.families.table import FAMILIES, ROPE_DECODERS
from tokenprune.models.families.towers import TOWERS, TowerRow, tower_kind, tower_of

__all__ = [
    "FAMILIES",
    "OLDEST",
    "REFUSED",
    "REFUSED_IN_VLLM",
    "ROPE_DECODERS",
    "SERVED",
    "SUPPORTED",
    "TOWERS",
    "UNCUT",
    "Family",
    "TowerRow",
    "Vllm",
    "family_of",
    "family_of_config",
    "tower_kind",
    "tower_of",
]

# Model types of transformers, and architectures of vLLM.
SUPPORTED = {name: row for name, row in FAMILIES.items() if row.since is not None}
SERVED = {row.vllm.architecture: row for row in FAMILIES.values() if row.vllm.architecture}


def family_of(model_type: str) -> Family:
    """Return the row of a model type; one of the common contract where there is none."""
    return FAMILIES.get(model_type) or Family(model_type)


def family_of_config(config: Any) -> Family:
    """Return the row of a model, with the way in which the tower of its config makes visual tokens (`patches`)."""
    row = family_of(config.model_type)
    return replace(row, patches=row.layout(config))
