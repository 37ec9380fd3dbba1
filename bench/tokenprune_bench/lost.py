# SPDX-License-Identifier: Apache-2.0
"""Points gained or lost, as text that never contradicts a bound beside it."""

from __future__ import annotations

POINTS = (1, 3)  # that may be lost, of the verdict


def signed(change: float) -> str:
    """Return a change of a share in points, "-1.0"; with two decimals or more where a bound of `POINTS` lies between
    the number and its rounding: -1.04 is more than one point lost."""
    value = 100 * change
    for digits in (1, 2, 3):
        shown = round(value, digits)
        if all((-shown <= points) == (-value <= points + 1e-7) for points in POINTS):
            break
    return f"{value:+.{digits}f}"
