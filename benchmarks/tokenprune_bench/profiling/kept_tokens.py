# SPDX-License-Identifier: Apache-2.0
"""Share of tokens after all cuts of a setting, and its format in texts. The keeps of a stack multiply."""

from __future__ import annotations

from collections.abc import Sequence

from tokenprune.budgets import Budget
from tokenprune.selection.method import Method


def count_kept_tokens(budgets: Sequence[Budget], visual: float) -> list[float]:
    """Return the number of kept tokens of an image after each cut.

    Args:
        budgets: Budget of each cut. Budgets of videos leave an image unchanged.
        visual: Number of tokens of the image.
    """
    counts: list[float] = []
    for budget in budgets:
        before = counts[-1] if counts else visual
        share = budget.share
        limit = budget.average_tokens if budget.keep is None else budget.keep
        target = before if limit is None else min(before, limit)  # budgets of videos leave an image unchanged
        counts.append(target if share is None else share * before)
    return counts


def compute_kept_share(budgets: Sequence[Budget], visual: float) -> float:
    """Return the share of an image's tokens after all cuts, 1 without cuts."""
    return ([visual, *count_kept_tokens(budgets, visual)][-1]) / max(1, visual)


def describe_cuts(methods: Sequence[Method], budgets: Sequence[Budget], visual: float) -> str:
    """Describe the result of each cut, and of all cuts of a stack together."""
    counts = [visual, *count_kept_tokens(budgets, visual)]
    parts = [
        f"{method.name} keeps {after:.0f} of {before:.0f} visual tokens ({format_percent(after / max(1, before))})"
        for method, before, after in zip(methods, counts, counts[1:], strict=False)
    ]
    total = (
        f": {counts[-1]:.0f} of {visual:.0f} in all ({format_percent(counts[-1] / max(1, visual))})"
        if parts[1:]
        else ""
    )
    return ", then ".join(parts) + total


def format_keep(keep: float | int | str, cuts: int, share: float) -> str:
    """Format a keep for captions: "0.25", or for several equal cuts "0.25 each, 6.25 % in all".

    Args:
        keep: Keep of each cut.
        cuts: Number of cuts.
        share: Share of the visual tokens after all cuts.
    """
    said = keep if isinstance(keep, str) else f"{keep:g}"
    return f"{said} each, {format_percent(share)} in all" if cuts > 1 else said


def format_percent(share: float) -> str:
    """Format a share in percent with at most three digits."""
    return f"{float(f'{100 * share:.3g}'):g} %"
