# SPDX-License-Identifier: Apache-2.0
"""Measured losses of each method by share of the tokens: assets/guard.json, which dev/guard.py makes of records of
two shipped models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().with_name("guard.json")


@dataclass(frozen=True)
class Loss:
    """The loss of one method at one keep on a kind's worst questions: shares right, `low` and `high` its 95 %
    interval. model: the shipped model that lost most."""

    keep: float
    share: float
    low: float
    high: float
    unpatched: float
    model: str

    @property
    def points(self) -> float:
        """The loss in points of a hundred."""
        return 100 * (self.unpatched - self.share)


class Floors:
    """The table. limit: the share of right answers that may be lost at a floor."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._methods, self._others, self.limit = table["methods"], table["others"], float(table["limit"])

    def of(self, method: str, kind: str) -> float:
        """Return the lowest share of the tokens that was measured to be enough; 1.0 if none was. For a method that was
        not measured, what is enough for the median of those that were."""
        measured = self._methods.get(method)
        return float(self._others[kind] if measured is None else measured[kind]["floor"])

    def loss(self, method: str, kind: str, share: float) -> Loss | None:
        """Return what was measured at the keep closest to `share`; None for a method that was not measured."""
        return self._measured(method, kind, share) if method in self._methods else None

    def safe(self, kind: str, share: float) -> list[str]:
        """Return the methods for which `share` is enough, those that lost least first."""
        names = [name for name in self._methods if self.of(name, kind) <= share]
        return sorted(names, key=lambda name: (self._measured(name, kind, share).points, name))

    def _measured(self, method: str, kind: str, share: float) -> Loss:
        found = [Loss(**one) for one in self._methods[method][kind]["measured"]]
        return min(found, key=lambda one: abs(one.keep - share))


@lru_cache(maxsize=1)
def shipped() -> Floors:
    """Return the table that ships with the package."""
    return Floors(json.loads(FILE.read_text(encoding="utf-8")))
