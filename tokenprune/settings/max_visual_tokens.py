# SPDX-License-Identifier: Apache-2.0
"""`max_visual_tokens=`: the most tokens that an image may make, ahead of whatever chooses among them.

It is `downsample` with a number under the name that users look for, and the first of a stack where methods follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError
from tokenprune.methods.registry import build, method_class
from tokenprune.selection.method import Method, Site
from tokenprune.selection.options import describe_type, matches_type

LIMITER = "downsample"
_MOST = Annotated[int, Ge(1)]


def apply_limit(
    methods: Sequence[Method], budgets: Sequence[Budget], most: int | None
) -> tuple[list[Method], list[Budget]]:
    """Return methods and their budgets with the limit in front, the same where there is none; raises what
    `check_limit` does."""
    if most is None:
        return [*methods], [*budgets]
    check_limit(most, [method.name for method in methods])
    return [build(LIMITER, {}), *methods], [Budget(tokens=most), *budgets]


def check_limit(most: int, methods: Sequence[str]) -> None:
    """Raise BudgetError for a limit that is no number of tokens, OptionError beside a method that acts on pixels."""
    if not matches_type(most, _MOST):
        raise BudgetError(
            f"max_visual_tokens={most!r} must be the most tokens of an image, {describe_type(_MOST)}; "
            "keep= takes shares"
        )
    pixels = [name for name in methods if method_class(name).site is Site.PRE_ENCODER]
    if LIMITER in pixels:
        raise OptionError(
            f"max_visual_tokens={most} is downsample with keep={most}, and downsample is named beside it: leave one out"
        )
    if pixels:
        raise OptionError(
            f"max_visual_tokens={most} makes images smaller, and so does {pixels[0]}: leave one of them out"
        )
