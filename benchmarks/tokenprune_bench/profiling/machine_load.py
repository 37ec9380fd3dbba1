# SPDX-License-Identifier: Apache-2.0
"""The load of a machine by other work, and warnings about times taken under it."""

from __future__ import annotations

import os


def get_machine_load() -> float | None:
    """Return the load of this machine over the last minute, None where it is not known."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def is_busy(load: float | None, cores: int | None) -> bool:
    """Return whether other work slowed what was timed: more wanted to run than there are cores."""
    return (load or 0) > 1.25 * (cores or 1)


def format_busy_note(load: float | None, cores: int | None = os.cpu_count()) -> str | None:
    """Return what to say beside times that were taken at a load; None where the machine was free."""
    if not is_busy(load, cores):
        return None
    return f"The machine was busy with other work (load {load:.1f} on {cores} cores): do not rely on these times."
