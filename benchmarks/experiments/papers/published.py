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
    """A table of a paper. `proposes` is the paper's method; its other rows are reruns of other methods."""

    arxiv: str
    title: str
    proposes: str
    version: str
    table: str
    note: str


@dataclass(frozen=True)
class Row:
    """A row of a source's table.

    Attributes:
        source: Name of the source.
        method: Name of the method.
        budget: The budget of its column: 192, 128 or 64 (576: unpruned).
        means: Meaning of the budget, a key of `Published.means`.
        values: Number for each benchmark.
        average: Printed average, in percent of the unpruned model.
        sets: Number of benchmarks in the average, if known.
        tokens: Actual number of tokens, if it differs.
        doubt: Reasons to doubt a benchmark's number.
        note: Note for the reader.
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
    """Contents of the file. `others` are titles of methods that we lack, `other_sets` benchmarks outside the table."""

    model: str
    note: str
    means: Mapping[str, str]
    others: Mapping[str, str]
    other_sets: Mapping[str, str]
    sources: Mapping[str, Source]
    left_out: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]

    def get_rows(self, method: str, budget: int | None = None) -> list[Row]:
        """Return the rows of a method in the order of the file."""
        return [row for row in self.rows if row.method == method and budget in (None, row.budget)]

    def unpruned(self, source: str) -> Mapping[str, float]:
        """Return the numbers of a source for the unpruned model, empty if unknown."""
        unpatched = self.get_rows(UNPATCHED)
        return next((row.values for row in unpatched if row.source == source), MappingProxyType({}))


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
