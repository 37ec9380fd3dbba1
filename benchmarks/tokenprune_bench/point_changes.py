# SPDX-License-Identifier: Apache-2.0
"""Points gained or lost, as text that never contradicts a bound beside it."""

from __future__ import annotations

POINTS = (1, 3)  # that may be lost, of the verdict


def format_change(change: float) -> str:
    """Return a change of a share in points, "-1.5"; with two decimals or more where one would put it on a bound of
    `POINTS` that it does not lie on: -1.04 is more than one point lost, and -0.96 less."""
    return f"{100 * change:+.{count_decimals(change)}f}"


def count_decimals(change: float) -> int:
    """Return the number of decimals that a change of a share has in points; see `signed`."""
    value = 100 * change
    return next((digits for digits in (1, 2, 3) if _bound(round(value, digits)) == _bound(value)), 3)


def _bound(value: float) -> int | None:
    """Return the bound that a change, in points, lies on."""
    return next((points for points in POINTS if abs(value + points) <= 1e-7), None)
