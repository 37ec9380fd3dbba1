# SPDX-License-Identifier: Apache-2.0
"""Names of the targets of a budget, and checks of their values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from typing import Any, cast

from tokenprune.errors import BudgetError

TARGETS = ("keep", "tokens", "average_tokens", "average_share", "kv_share", "flops_share", "per_second", "frames")
IMAGE_TARGETS = ("keep", "tokens")
SHARE_TARGETS = ("keep", "average_share", "kv_share", "flops_share")


def check_one_target(names: Collection[str]) -> None:
    """Raise BudgetError unless there is exactly one target."""
    if len(names) != 1:
        raise BudgetError(f"A Budget needs exactly one of {', '.join(TARGETS)}, not {', '.join(names) or 'none'}.")


def check_number(target: str, value: Any) -> None:
    """Raise BudgetError if the value of a target is not a number, or is out of range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or value != value:  # NaN
        raise BudgetError(f"{target}={value!r} must be a number.")
    is_integer, value = isinstance(value, numbers.Integral), cast(Any, value)
    if target not in IMAGE_TARGETS:
        if not value > 0 or (target in SHARE_TARGETS and value > 1) or value == math.inf:
            limit = ", and at most 1" if target in SHARE_TARGETS else ""
            raise BudgetError(f"{target}={value!r} is out of range. It must be positive{limit}.")
    elif target == "tokens" and not is_integer:
        raise BudgetError(f"tokens={value!r} must be an int >= 1 (tokens per image). Pass a share as keep=.")
    elif is_integer and value < 1:
        raise BudgetError(
            f"{target}={value} keeps no token. Pass an int >= 1 (tokens per image) or a float in (0, 1] (share)."
        )
    elif is_integer and target == "keep" and value == 1:
        raise BudgetError(
            "keep=1 is ambiguous. Pass 1.0 to keep all tokens, or Budget(tokens=1) to keep one token per image (in "
            'JSON 1.0 or {"tokens": 1}).'
        )
    elif not is_integer and not 0 < value <= 1:
        raise BudgetError(
            f"keep={value!r} is not a valid share. Pass a float in (0, 1], such as 0.25, or an int (tokens per image)."
        )
