# SPDX-License-Identifier: Apache-2.0
"""Read the arguments `method`, `keep` and options of `tokenprune.patch` and similar functions."""

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
        arguments: Names of the other arguments of the caller, to suggest one if an option is misspelled.

    Raises:
        UnknownMethodError: If a name is not registered.
        OptionError: If an option is unknown or invalid.
    """
    methods: list[Any] = list(method) if isinstance(method, (list, tuple)) else [method]
    if not methods:
        raise OptionError("method is an empty list. Name at least one method.")
    if len(methods) > 1 and options:
        for option in options:
            if hint := did_you_mean(option, arguments):
                raise OptionError(f"patch() has no argument {option!r}. {hint.strip()}")
        raise OptionError(
            f"options {', '.join(options)} are ambiguous for several methods. Pass configured methods, such as "
            'method=[tokenprune.method("fastv", layer=3), "divprune"].'
        )
    if options and isinstance(methods[0], Method):
        raise OptionError(f"A configured method ignores options {', '.join(options)}. Set them in the method.")
    return [method if isinstance(method, Method) else build(method, options, arguments) for method in methods]


def read_budgets(keep: Any, methods: Sequence[Method]) -> list[Budget]:
    """Return the budget of each method.

    Args:
        keep: Argument of `tokenprune.patch`.
        methods: Configured methods.

    Raises:
        BudgetError: If `keep` is invalid, or a method does not support it.
    """
    if keep is None:
        return [Budget.from_keep(method.default_keep) for method in methods]
    if isinstance(keep, (list, tuple)):
        if len(keep) != len(methods):
            raise BudgetError(
                f"keep has {len(keep)} entries for {len(methods)} methods. Pass one number, or one per method."
            )
        budgets = [Budget.from_keep(value) for value in keep]
    else:
        budgets = [Budget.from_keep(keep)] * len(methods)
    for method, budget in zip(methods, budgets, strict=True):
        check_scope(method, budget)
    return budgets
