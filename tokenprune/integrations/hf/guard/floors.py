# SPDX-License-Identifier: Apache-2.0
"""Measured accuracy losses of each method by keep, from guard.json (written by dev/guard.py for two shipped models)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().with_name("guard.json")


@dataclass(frozen=True)
class Loss:
    """Accuracy of one method at one keep, on the kind's questions where it loses most.

    Attributes:
        keep: Share of the visual tokens.
        share: Share of correct answers.
        low: Lower end of the 95 % confidence interval of `share`.
        high: Upper end of the 95 % confidence interval of `share`.
        unpatched: Share of correct answers of the unpatched model.
        model: The shipped model that loses most.
    """

    keep: float
    share: float
    low: float
    high: float
    unpatched: float
    model: str

    @property
    def points(self) -> float:
        """Loss in percentage points."""
        return 100 * (self.unpatched - self.share)


class Floors:
    """Table of the lowest safe keep of each method and kind of question.

    Args:
        table: Contents of guard.json. `table["limit"]` is the share of correct answers that may be lost at a floor.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        self._methods, self._others, self.limit = table["methods"], table["others"], float(table["limit"])

    def get_floor(self, method: str, kind: str) -> float:
        """Return the lowest keep that was measured to be enough, or 1.0 if none was.

        A method without measurements gets the median floor of the measured methods.
        """
        measured = self._methods.get(method)
        return float(self._others[kind] if measured is None else measured[kind]["floor"])

    def get_loss(self, method: str, kind: str, share: float) -> Loss | None:
        """Return the loss at the measured keep closest to `share`, or None for a method without measurements."""
        return self._find_loss(method, kind, share) if method in self._methods else None

    def list_safe_methods(self, kind: str, share: float) -> list[str]:
        """Return the methods for which `share` is enough, sorted by loss."""
        names = [name for name in self._methods if self.get_floor(name, kind) <= share]
        return sorted(names, key=lambda name: (self._find_loss(name, kind, share).points, name))

    def _find_loss(self, method: str, kind: str, share: float) -> Loss:
        losses = [Loss(**fields) for fields in self._methods[method][kind]["measured"]]
        return min(losses, key=lambda loss: abs(loss.keep - share))


@lru_cache(maxsize=1)
def load_floors() -> Floors:
    """Load the table that ships with the package."""
    return Floors(json.loads(FILE.read_text(encoding="utf-8")))
