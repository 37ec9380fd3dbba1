# SPDX-License-Identifier: Apache-2.0
"""The repr of a budget: a call that creates it."""

from __future__ import annotations

from typing import Protocol

from tokenprune.budgets.from_json import JsonBudget
from tokenprune.budgets.over_layers import CostShare


class FormattedBudget(JsonBudget, Protocol):
    """Part of a `Budget` that its repr contains."""

    @property
    def keep(self) -> float | int | None: ...

    @property
    def tokens(self) -> int | None: ...

    @property
    def per(self) -> str: ...

    @property
    def cost(self) -> CostShare | None: ...


def format_budget(budget: FormattedBudget) -> str:
    """Return a call that creates the budget, such as `Budget(keep=0.25)`."""
    keep = "Budget(tokens=1)" if budget.tokens == 1 else repr(budget.keep)
    per = "" if budget.per == "image" else f", per={budget.per!r}"
    if budget.ages is not None:
        return f"Budget.by_age({keep}, {budget.ages.tiers!r}, step={budget.ages.step})"
    if budget.video is not None:
        return f"Budget.{budget.video.describe_constructor(keep, per)}"
    if budget.cost is not None:
        return f"Budget.from_{budget.target}({budget.amount!r}{per})"
    name = "keep" if budget.target == "tokens" and budget.amount != 1 else budget.target
    return f"Budget({name}={budget.amount!r}{per})"
