# SPDX-License-Identifier: Apache-2.0
"""Format gained or lost points so that rounding never contradicts the verdict's bounds."""

from __future__ import annotations

POINTS = (1, 3)  # bounds of the verdict: points that may be lost


def format_change(change: float) -> str:
    """Format a change of a share in points, "-1.5".

    More decimals are used if one decimal would round the change to a bound of `POINTS`: -1.04 is below the bound -1,
    and -0.96 is above it.

    Examples:
        >>> format_change(-0.015), format_change(-0.0104)
        ('-1.5', '-1.04')
    """
    return f"{100 * change:+.{count_decimals(change)}f}"


def count_decimals(change: float) -> int:
    """Return the number of decimals that `format_change` uses."""
    value = 100 * change
    return next((digits for digits in (1, 2, 3) if _bound(round(value, digits)) == _bound(value)), 3)


def _bound(value: float) -> int | None:
    """Return the bound that equals a change in points, or None."""
    return next((points for points in POINTS if abs(value + points) <= 1e-7), None)
