# SPDX-License-Identifier: Apache-2.0
"""Read the arguments `method`, `keep` and options of `tokenprune.patch` and of the functions that take the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError, OptionError
from tokenprune.methods.registry import build, did_you_mean
from tokenprune.selection.method import Method
from tokenprune.settings.budget_checks import check_scope


def read_methods(
    method: str | Method | Sequence[str | Method], options: dict[str, Any], arguments: Sequence[str] = ()
) -> list[Method]:
    """Return the configured methods.

    Args:
        method: A name, a configured method, or a list of them.
        options: Options of the method, by name.
        arguments: Names of the other arguments of the caller, to suggest where an option is misspelled.

    Raises:
        UnknownMethodError: If a name is not registered.
        OptionError: If an option is unknown or does not fit.
    """
    given: list[Any] = list(method) if isinstance(method, (list, tuple)) else [method]
    if not given:
        raise OptionError("method is an empty list: name at least one method")
    if len(given) > 1 and options:
        for option in options:
            if hint := did_you_mean(option, arguments):
                raise OptionError(f"patch() has no argument {option!r}: {hint.strip()}")
        raise OptionError(
            f"options {', '.join(options)} are ambiguous for several methods: pass configured methods, "
            'for example method=[tokenprune.method("fastv", layer=3), "divprune"]'
        )
    if options and isinstance(given[0], Method):
        raise OptionError(f"options {', '.join(options)} are ignored by a configured method: set them when you make it")
    return [one if isinstance(one, Method) else build(one, options, arguments) for one in given]


def read_budgets(keep: Any, methods: Sequence[Method]) -> list[Budget]:
    if keep is None:
        return [Budget.from_keep(method.default_keep) for method in methods]
    if isinstance(keep, (list, tuple)):
        if len(keep) != len(methods):
            raise BudgetError(
                f"keep has {len(keep)} entries for {len(methods)} methods: give one number, or one for each method"
            )
        budgets = [Budget.from_keep(one) for one in keep]
    else:
        budgets = [Budget.from_keep(keep)] * len(methods)
    for method, budget in zip(methods, budgets, strict=True):
        check_scope(method, budget)
    return budgets
