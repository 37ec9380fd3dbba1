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
        raise BudgetError(f"a Budget needs exactly one of {', '.join(TARGETS)}; given: {', '.join(names) or 'none'}")


def check_number(target: str, value: Any) -> None:
    """Raise BudgetError if the value of a target is not a number, or is out of range."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or value != value:  # NaN
        raise BudgetError(f"{target} must be a number, not {value!r}")
    whole, value = isinstance(value, numbers.Integral), cast(Any, value)
    if target not in IMAGE_TARGETS:
        if not value > 0 or (target in SHARE_TARGETS and value > 1) or value == math.inf:
            limit = ", and at most 1" if target in SHARE_TARGETS else ""
            raise BudgetError(f"{target}={value!r} is out of range: it must be positive{limit}")
    elif target == "tokens" and not whole:
        raise BudgetError(f"tokens={value!r} is no number of tokens per image: use an int >= 1; keep= takes shares")
    elif whole and value < 1:
        raise BudgetError(
            f"{target}={value} keeps nothing: use an int >= 1 (tokens per image) or a float in (0, 1] (share)"
        )
    elif whole and target == "keep" and value == 1:
        raise BudgetError(
            "keep=1 could mean all tokens or a single one: use keep=1.0 for all of them, or Budget(tokens=1) for one "
            'of each image (in JSON 1.0 and {"tokens": 1})'
        )
    elif not whole and not 0 < value <= 1:
        raise BudgetError(
            f"keep={value!r} is no share: use a float in (0, 1], where 0.25 keeps a quarter of each image, or an "
            "int for tokens per image"
        )
