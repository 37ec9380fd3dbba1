# SPDX-License-Identifier: Apache-2.0
"""The share that the cuts of a setting leave together, in words: keeps of a stack multiply."""

from __future__ import annotations

from collections.abc import Sequence

from tokenprune.budgets import Budget
from tokenprune.selection.method import Method


def count_kept_tokens(budgets: Sequence[Budget], visual: float) -> list[float]:
    """Return how many of an image's tokens are left after each cut, by its number or share; of a budget of another
    kind the share that it asks for."""
    left: list[float] = []
    for budget in budgets:
        before = left[-1] if left else visual
        share = budget.share
        number = budget.average_tokens if budget.keep is None else budget.keep
        asked = before if number is None else min(before, number)  # budgets of videos leave an image as it is
        left.append(asked if share is None else share * before)
    return left


def compute_kept_share(budgets: Sequence[Budget], visual: float) -> float:
    """Return what all cuts leave together, as a share of an image's tokens; 1 without a cut."""
    return ([visual, *count_kept_tokens(budgets, visual)][-1]) / max(1, visual)


def describe_cuts(methods: Sequence[Method], budgets: Sequence[Budget], visual: float) -> str:
    """Return what each cut leaves of what reaches it, and of a stack all together."""
    counts = [visual, *count_kept_tokens(budgets, visual)]
    parts = [
        f"{method.name} keeps {after:.0f} of {before:.0f} visual tokens ({format_percent(after / max(1, before))})"
        for method, before, after in zip(methods, counts, counts[1:], strict=False)
    ]
    whole = (
        f": {counts[-1]:.0f} of {visual:.0f} in all ({format_percent(counts[-1] / max(1, visual))})"
        if parts[1:]
        else ""
    )
    return ", then ".join(parts) + whole


def format_keep(keep: float | int | str, cuts: int, share: float) -> str:
    """Return a keep as captions show it: "0.25", and of several cuts that have it each "0.25 each, 6.25 % in all".

    share: what is left of the visual tokens.
    """
    said = keep if isinstance(keep, str) else f"{keep:g}"
    return f"{said} each, {format_percent(share)} in all" if cuts > 1 else said


def format_percent(share: float) -> str:
    """Return a share in percent, of three digits at most."""
    return f"{float(f'{100 * share:.3g}'):g} %"
