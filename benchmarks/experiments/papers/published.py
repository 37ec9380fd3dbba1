# SPDX-License-Identifier: Apache-2.0
"""The published numbers of llava15_7b.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

FILE = Path(__file__).parent / "llava15_7b.json"
BUDGETS = (192, 128, 64)
UNPATCHED = "unpatched"


@dataclass(frozen=True)
class Source:
    """A table of a paper. proposes: the method that is the paper's own; its other rows are reruns of other methods."""

    arxiv: str
    title: str
    proposes: str
    version: str
    table: str
    note: str


@dataclass(frozen=True)
class Row:
    """One row of a source's table.

    budget: the 192, 128 or 64 that it stands under (576: unpruned). means: what that counts, a key of
    `Published.means`. tokens: what it really is, where that differs. values: a number for each benchmark. average:
    percent of the unpruned model, printed by the source, over `sets` benchmarks where that is known. doubt: benchmark
    -> why to doubt its number.
    """

    source: str
    method: str
    budget: int
    means: str
    values: Mapping[str, float]
    average: float | None = None
    sets: int | None = None
    tokens: str | None = None
    doubt: Mapping[str, str] = field(default_factory=dict)
    note: str | None = None


@dataclass(frozen=True)
class Published:
    """All of the file. others: titles of methods that are not ours; other_sets: of benchmarks outside the table."""

    model: str
    note: str
    means: Mapping[str, str]
    others: Mapping[str, str]
    other_sets: Mapping[str, str]
    sources: Mapping[str, Source]
    left_out: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]

    def of(self, method: str, budget: int | None = None) -> list[Row]:
        """Return the rows of a method, in the order of the file."""
        return [row for row in self.rows if row.method == method and budget in (None, row.budget)]

    def unpruned(self, source: str) -> Mapping[str, float]:
        """Return what a source prints for the unpruned model; empty where that is not known."""
        return next((row.values for row in self.of(UNPATCHED) if row.source == source), MappingProxyType({}))


@cache
def published() -> Published:
    """Read the file."""
    data = json.loads(FILE.read_text())
    return Published(
        **data
        | {
            "sources": {name: Source(**source) for name, source in data["sources"].items()},
            "left_out": tuple(map(tuple, data["left_out"])),
            "rows": tuple(Row(**row) for row in data["rows"]),
        }
    )
