# SPDX-License-Identifier: Apache-2.0
"""The table of model families: one row a family, one row a vision tower, and the models that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tokenprune.models.families.refused import PIXELS_ONLY, REFUSED, REFUSED_IN_VLLM
from tokenprune.models.families.row import OLDEST_TRANSFORMERS, Family, Vllm
from tokenprune.models.families.table import FAMILIES, ROPE_DECODERS
from tokenprune.models.families.towers import TOWERS, TowerRow, get_tower, get_tower_type

__all__ = [
    "FAMILIES",
    "OLDEST_TRANSFORMERS",
    "PIXELS_ONLY",
    "REFUSED",
    "REFUSED_IN_VLLM",
    "ROPE_DECODERS",
    "SERVED",
    "SUPPORTED",
    "TOWERS",
    "Family",
    "TowerRow",
    "Vllm",
    "get_config_family",
    "get_family",
    "get_tower",
    "get_tower_type",
]

# Model types of transformers, and architectures of vLLM.
SUPPORTED = {name: row for name, row in FAMILIES.items() if row.since is not None}
SERVED = {row.vllm.architecture: row for row in FAMILIES.values() if row.vllm.architecture}


def get_family(model_type: str) -> Family:
    """Return the row of a model type; one of the common contract where there is none."""
    return FAMILIES.get(model_type) or Family(model_type)


def get_config_family(config: Any) -> Family:
    """Return the row of a model, with the way in which the tower of its config makes visual tokens (`patches`)."""
    row = get_family(config.model_type)
    return replace(row, patches=row.layout(config))
