# SPDX-License-Identifier: Apache-2.0
"""What a config tells of dropping units ahead of a vision tower: which models can, and by which settings."""

from __future__ import annotations

from typing import Any

from tokenprune.base import Method
from tokenprune.budget import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.vllm.families import FAMILIES
from tokenprune.integrations.vllm.setting.tower_checks import INSTEAD, check_whole
from tokenprune.sites.units import UnitDropper


def drops_units(method: Method | None) -> bool:
    return isinstance(method, UnitDropper)


def check_dropping(setting: Any, model_config: Any) -> None:
    """Raise UnsupportedSetupError if this model's tower has a fixed grid, or its images are spread over devices;
    OptionError for a budget that contradicts the options."""
    method = setting.method
    if not FAMILIES[model_config.architecture].packed:
        served = ", ".join(name for name, family in FAMILIES.items() if family.packed)
        raise UnsupportedSetupError(
            f"{method.name} drops patches ahead of the vision tower, and that of {model_config.architecture} takes "
            f"whole grids alone; it is served for {served}. For this one {INSTEAD}"
        )
    check_whole(method, model_config)
    method.is_identity(Budget.of_checked(setting.keep))
