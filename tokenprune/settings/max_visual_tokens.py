# SPDX-License-Identifier: Apache-2.0
"""The argument `max_visual_tokens`: the maximum number of tokens per image, before other methods select tokens.

It is equivalent to the method "downsample" with a number of tokens, as the first of several methods.
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
_COUNT = Annotated[int, Ge(1)]


def apply_limit(
    methods: Sequence[Method], budgets: Sequence[Budget], max_tokens: int | None
) -> tuple[list[Method], list[Budget]]:
    """Return the methods and budgets with the limit as the first method. Raises like `check_limit`.

    Args:
        methods: Configured methods.
        budgets: Budget of each method.
        max_tokens: Maximum number of tokens per image. None: no limit.
    """
    if max_tokens is None:
        return [*methods], [*budgets]
    check_limit(max_tokens, [method.name for method in methods])
    return [build(LIMITER, {}), *methods], [Budget(tokens=max_tokens), *budgets]


def check_limit(max_tokens: int, methods: Sequence[str]) -> None:
    """Check a limit.

    Args:
        max_tokens: Maximum number of tokens per image.
        methods: Names of the methods.

    Raises:
        BudgetError: If the limit is not an int >= 1.
        OptionError: If another method acts on pixels.
    """
    if not matches_type(max_tokens, _COUNT):
        raise BudgetError(
            f"max_visual_tokens={max_tokens!r} must be a number of tokens, {describe_type(_COUNT)}. "
            "Pass a share as keep=."
        )
    pixels = [name for name in methods if method_class(name).site is Site.PRE_ENCODER]
    if LIMITER in pixels:
        raise OptionError(
            f"max_visual_tokens={max_tokens} already means downsample with keep={max_tokens}. Leave out one."
        )
    if pixels:
        raise OptionError(f"max_visual_tokens={max_tokens} resizes images, and so does {pixels[0]}. Leave out one.")
