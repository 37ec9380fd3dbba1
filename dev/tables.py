# SPDX-License-Identifier: Apache-2.0
"""Parts that the page generators share: a Markdown table, and the accuracy in a string of right and wrong answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def format_table(titles: Sequence[str], lines: Iterable[Iterable[str]], left: int | None = None) -> str:
    """Return a Markdown table.

    Args:
        titles: Titles of the columns.
        lines: Cells of each row.
        left: Number of columns that are aligned to the left. The others are aligned to the right. None means all.
    """
    left = len(titles) if left is None else left
    rule = "|---" * left + "|---:" * (len(titles) - left) + "|"
    return "\n".join([f"| {' | '.join(titles)} |", rule, *(f"| {' | '.join(cells)} |" for cells in lines)])


def format_keeps(keeps: Iterable[float]) -> list[str]:
    return [f"keep {keep:g}" for keep in keeps]


def format_share(right: str) -> str:
    """Return the share of right answers in percent. right: "1" or "0" per question."""
    return f"{100 * right.count('1') / len(right):.1f}"
