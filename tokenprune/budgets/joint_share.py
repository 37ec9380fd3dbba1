# SPDX-License-Identifier: Apache-2.0
"""Share of the visual tokens that remains after several budgets."""

from __future__ import annotations

from collections.abc import Sequence

from tokenprune.budgets.budget import Budget


def compute_joint_share(budgets: Sequence[Budget], tokens: int | None = None) -> float | None:
    """Return the share of an image's visual tokens that remains if budgets are applied one after the other.

    Args:
        budgets: Budgets in order.
        tokens: Number of tokens of the image. Each budget then leaves a whole number of tokens. None if it is unknown.

    Returns:
        The share, or None if a budget is an average over the layers, or a number of tokens while `tokens` is None.

    Examples:
        >>> compute_joint_share([Budget(keep=0.5), Budget(keep=0.5)])
        0.25
    """
    share, remaining = 1.0, tokens
    for budget in budgets:
        if budget.keep is None or (remaining is None and budget.tokens is not None):
            return None
        if remaining is None:
            share *= budget.amount
        else:
            remaining = budget.resolve_keep(remaining)
    return share if remaining is None or tokens is None else remaining / tokens
