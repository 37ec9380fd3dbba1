# SPDX-License-Identifier: Apache-2.0
"""Methods that budgets by age go with."""

from __future__ import annotations

from tokenprune.base import Method, Site
from tokenprune.budget import Budget
from tokenprune.errors import BudgetError

_ANY_DEPTH = 32  # layers of a decoder that stages are asked for where none is at hand


def check_age(method: Method, budget: Budget) -> None:
    """Raise BudgetError for a budget by age of a method whose choice changes when a chat gets longer, or that cuts at
    several places."""
    if budget.age is None:
        return
    once = method.site is Site.PRE_LLM and method.stages(budget, _ANY_DEPTH) == [(method, budget)]
    if not once or not method.prefix_cache_safe:
        why = "reads the question" if once else "does not make its one cut before the language model"
        raise BudgetError(
            f"{method.name} {why}, so a longer prompt would change what it keeps of earlier images: age= goes with "
            "methods such as divprune, visionzip or pool (tokenprune methods --site PRE_LLM --prefix-cache-safe)"
        )
