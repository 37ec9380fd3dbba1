# SPDX-License-Identifier: Apache-2.0
"""The table of model families: rows of model types, rows of vision towers, and unsupported models."""

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

# Rows by model type of transformers, and rows by architecture of vLLM.
SUPPORTED = {name: row for name, row in FAMILIES.items() if row.since is not None}
SERVED = {row.vllm.architecture: row for row in FAMILIES.values() if row.vllm.architecture}


def get_family(model_type: str) -> Family:
    """Return the row of a model type. Types without a row get the defaults of the common contract.

    Examples:
        >>> get_family("qwen2_5_vl").patches
        'runs'
    """
    return FAMILIES.get(model_type) or Family(model_type)


def get_config_family(config: Any) -> Family:
    """Return the row of a model's config, with `patches` set for the vision tower of this config."""
    row = get_family(config.model_type)
    return replace(row, patches=row.layout(config))
