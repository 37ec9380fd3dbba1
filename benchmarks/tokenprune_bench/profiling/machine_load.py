# SPDX-License-Identifier: Apache-2.0
"""Load of the machine by other processes, and notes about times measured under load."""

from __future__ import annotations

import os


def get_machine_load() -> float | None:
    """Return the load average of the last minute, or None if it is not known."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def is_busy(load: float | None, cores: int | None) -> bool:
    """Return True if the load exceeds the number of cores by more than 25 %."""
    return (load or 0) > 1.25 * (cores or 1)


def format_busy_note(load: float | None, cores: int | None = os.cpu_count()) -> str | None:
    """Return a note about times measured under a high load, or None."""
    if not is_busy(load, cores):
        return None
    return f"The machine was busy (load {load:.1f} on {cores} cores): do not rely on these times."
