# SPDX-License-Identifier: Apache-2.0
"""Check that a method supports a budget by age or a video budget."""

from __future__ import annotations

from tokenprune.budgets import Budget
from tokenprune.errors import BudgetError
from tokenprune.selection.method import Method, Pruner, Site

_ANY_DEPTH = 32  # number of decoder layers to call `Method.stages` with, because no model is known here


def check_scope(method: Method, budget: Budget) -> None:
    """Raise BudgetError if a method does not support a budget by age or a video budget.

    Both require a single cut at the decoder. A budget by age also requires a selection that does not change when a chat
    grows.
    """
    if budget.ages is None and budget.video is None:
        return
    has_one_cut = isinstance(method, Pruner) and method.stages(budget, _ANY_DEPTH) == [(method, budget)]
    if budget.ages is not None:
        _check_age(method, has_one_cut and method.site is Site.PRE_LLM)
    if budget.video is not None and (not has_one_cut or method.site is Site.DECODE):
        why = "cuts more than once" if isinstance(method, Pruner) else f"acts {method.site.description}"
        raise BudgetError(
            f"{method.name} {why}, but {budget} requires one cut at the decoder. Use a method such as divprune, fastv "
            "or visionzip, or pass keep=."
        )


def _check_age(method: Method, has_one_cut: bool) -> None:
    if not has_one_cut or not method.prefix_cache_safe:
        why = "reads the question" if has_one_cut else "does not make a single cut before the language model"
        raise BudgetError(
            f"{method.name} {why}, so a longer prompt would change the kept tokens of earlier images. Use age= with a "
            "method such as divprune, visionzip or pool (tokenprune methods --site PRE_LLM --prefix-cache-safe)."
        )
