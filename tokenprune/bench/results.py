# SPDX-License-Identifier: Apache-2.0
"""From the records of a benchmark to what its tables say: shares with intervals, marks, and kinds that collapsed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenprune.bench.significance import is_better, pooled_interval
from tokenprune.errors import TokenPruneError

SCHEMA = 1
UNPATCHED = "unpatched"
MARKS = {"random": "≤rnd", "downsample": "≤down"}
COLLAPSE = 0.20  # a kind that loses more than this against the unpatched model is shown as lost


@dataclass(frozen=True)
class Share:
    """A share right with its 95 % interval, all in [0, 1]; collapsed: it fell by more than `COLLAPSE`."""

    value: float
    low: float
    high: float
    collapsed: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the tables. `stats` and `timing` are those of the record; tokens in them are sums over all questions.

    marks: the baselines at the same keep that this method is not significantly better than.
    """

    method: str
    keep: float | int
    site: str | None
    overall: Share
    kinds: dict[str, Share]
    marks: tuple[str, ...]
    questions: int
    stats: dict[str, Any]
    timing: dict[str, Any] | None

    @property
    def tokens_in(self) -> float:
        """Visual tokens of one question's picture before pruning."""
        return self.stats["visual_tokens_in"] / self.questions

    @property
    def tokens_out(self) -> float:
        """Visual tokens of one question's picture in the last decoder layer."""
        return self.stats["visual_tokens_out"] / self.questions

    @property
    def tokens_average(self) -> float:
        """Visual tokens of one question's picture, averaged over the decoder's layers."""
        return self.stats["visual_tokens_average"] / self.questions


@dataclass(frozen=True)
class Results:
    """A whole benchmark: its header, a row for each result in the order of the run, and what was skipped."""

    header: dict[str, Any]
    rows: list[Row]
    skipped: list[dict[str, Any]]

    @property
    def kinds(self) -> list[str]:
        return self.header["kinds"]

    @property
    def baseline(self) -> Row:
        """The unpatched model."""
        return self.rows[0]


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Read JSON lines that `tokenprune bench --json` wrote; raises TokenPruneError for anything else."""
    path = Path(path)
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise TokenPruneError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TokenPruneError(f"{path} holds no JSON lines: {error}") from error
    if not records or not isinstance(records[0], dict) or records[0].get("record") != "header":
        raise TokenPruneError(f"{path} was not written by `tokenprune bench --json`: its first line is no header")
    if records[0].get("schema") != SCHEMA:
        found = records[0].get("schema")
        raise TokenPruneError(f"{path} has schema {found}, this version reads {SCHEMA}: run the bench again")
    return records


def summarise(records: Iterable[dict[str, Any]]) -> Results:
    """Work out shares, intervals, marks and collapsed kinds; raises TokenPruneError without an unpatched record."""
    header, *rest = records
    results = [record for record in rest if record["record"] == "result"]
    base = next((record for record in results if record["method"] == UNPATCHED), None)
    if base is None:
        raise TokenPruneError("these records hold no result of the unpatched model to compare with")
    places = _places(header)
    before = {kind: pooled_interval(_pick(base["right"], places[kind]))[0] for kind in places}
    rivals = {(one["method"], one["keep"]): one["right"] for one in results if one["method"] in MARKS}
    results = [base, *(record for record in results if record is not base)]
    rows = [_row(record, places, before, rivals) for record in results]
    return Results(header, rows, [record for record in rest if record["record"] == "skipped"])


def _places(header: dict[str, Any]) -> dict[str, list[int]]:
    """The indices of each kind's questions; kinds that were not asked are left out."""
    asked = header["kind_of_question"]
    places = {kind: [i for i, k in enumerate(asked) if k == f"{n}"] for n, kind in enumerate(header["kinds"])}
    return {kind: indices for kind, indices in places.items() if indices}


def _pick(answers: list[str], indices: list[int]) -> list[str]:
    return ["".join(one[index] for index in indices) for one in answers]


def _row(
    record: dict[str, Any], places: dict[str, list[int]], before: dict[str, float], rivals: dict[tuple, list[str]]
) -> Row:
    kinds = {}
    for kind, indices in places.items():
        share, low, high = pooled_interval(_pick(record["right"], indices))
        # Not a rounding error away from the limit: 0.8 - 0.6 > 0.2 in floating point.
        kinds[kind] = Share(share, low, high, before[kind] - share > COLLAPSE + 1e-9)
    return Row(
        method=record["method"],
        keep=record["keep"],
        site=record["site"],
        overall=Share(*pooled_interval(record["right"])),
        kinds=kinds,
        marks=marks_of(record["method"], record["keep"], record["right"], rivals),
        questions=record["questions"],
        stats=record["stats"],
        timing=record.get("timing"),
    )


def marks_of(method: str, keep: float | int, right: list[str], rivals: dict[tuple, list[str]]) -> tuple[str, ...]:
    """Return the marks of the baselines that `method` does not beat at this keep.

    right: its answers, one string a seed. rivals: the answers of each (baseline, keep) that ran.
    """
    if method == UNPATCHED:
        return ()
    return tuple(
        mark
        for name, mark in MARKS.items()
        if name != method and (name, keep) in rivals and not is_better(right, rivals[name, keep])
    )
