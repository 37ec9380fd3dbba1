# SPDX-License-Identifier: Apache-2.0
"""Check budgets that only some methods can keep: those by age, and those of videos."""

from __future__ import annotations

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.selection.method import Method, Pruner, Site

_ANY_DEPTH = 32  # layers of a decoder that stages are asked for where none is at hand


def check_scope(method: Method, budget: Budget) -> None:
    """Raise BudgetError for a budget by age of a method whose choice changes when a chat gets longer, and for one by
    age or of videos of a method that cuts at several places, or elsewhere than at the decoder."""
    if budget.ages is None and budget.video is None:
        return
    once = isinstance(method, Pruner) and method.stages(budget, _ANY_DEPTH) == [(method, budget)]
    if budget.ages is not None:
        _check_age(method, once and method.site is Site.PRE_LLM)
    if budget.video is not None and (not once or method.site is Site.DECODE):
        why = "cuts more than once" if isinstance(method, Pruner) else f"acts {method.site.description}"
        raise BudgetError(
            f"{method.name} {why}, and {budget} is for one cut at the decoder: use a method such as divprune, fastv or "
            "visionzip, or say keep="
        )


def _check_age(method: Method, once: bool) -> None:
    if not once or not method.prefix_cache_safe:
        why = "reads the question" if once else "does not make its one cut before the language model"
        raise BudgetError(
            f"{method.name} {why}, so a longer prompt would change what it keeps of earlier images: age= goes with "
            "methods such as divprune, visionzip or pool (tokenprune methods --site PRE_LLM --prefix-cache-safe)"
        )
