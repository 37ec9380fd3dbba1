# SPDX-License-Identifier: Apache-2.0
"""Check entries of the leaderboard: schema and consistency."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenprune.errors import shorten
from tokenprune.selection.method import Site
from tokenprune.selection.options import describe_type, get_option_types, matches_type
from tokenprune_bench.errors import DataError
from tokenprune_bench.leaderboard.entry import MIN_QUESTIONS, MIN_SEEDS, SCHEMA, LeaderboardEntry, Line
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.results import MARKS
from tokenprune_bench.significance import wilson

_LONGEST = {"by": 80, "note": 300, "model": 120, "data": 120}  # characters
_TOLERANCE = 1e-5  # values are rounded


def read_entry(path: Path) -> LeaderboardEntry:
    """Read and check an entry.

    Raises:
        DataError: If the file is not valid.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    try:
        entry = _parse_entry(data)
        check_entry(entry)
        _require(path.name == get_file_name(entry), f"its name must be {get_file_name(entry)}")
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return entry


def get_file_name(entry: LeaderboardEntry) -> str:
    """Return the name of the file of an entry: the model and the digest of the run."""
    return f"{re.sub(r'[^a-z0-9.]+', '-', entry.model.lower()).strip('-.')}-{entry.run}.json"


def to_json(entry: LeaderboardEntry) -> dict[str, Any]:
    """Return an entry as a JSON object."""
    return asdict(entry)


def check_entry(entry: LeaderboardEntry) -> None:
    """Raise DataError if the fields of an entry have wrong types or contradict each other."""
    _check_types(entry)
    for line in entry.lines:
        _check_types(line, f"{shorten(getattr(line, 'method', line))}: ")
    for name, longest in _LONGEST.items():
        text = getattr(entry, name)
        _require(
            len(text) <= longest and text.isprintable(), f"{name} must be one line of at most {longest} characters"
        )
    _require(entry.by.strip() and entry.model.strip(), "by and model must not be empty")
    _require(re.fullmatch(r"[0-9a-f]{12}", entry.run), f"run={entry.run!r} must be twelve hexadecimal digits")
    try:
        datetime.datetime.fromisoformat(entry.date)
    except ValueError:
        raise DataError(f"date={entry.date!r} is not a date such as 2026-11-22T19:00:42+00:00") from None
    plain = all(
        isinstance(version, str) and version.isprintable() and len(version) < 40 for version in entry.versions.values()
    )
    _require(plain and "tokenprune" in entry.versions, "versions must include tokenprune")
    engine = "vllm" if entry.engine == "vllm" else "transformers"
    _require(engine in entry.versions, f"versions must include {engine}")
    _require(entry.metric in METRICS, f"metric={entry.metric!r} is not one of {', '.join(METRICS)}")
    _require(
        entry.questions >= MIN_QUESTIONS, f"{entry.questions} questions are too few. Ask at least {MIN_QUESTIONS}."
    )
    seeds = len(set(entry.seeds))
    _require(seeds >= MIN_SEEDS, f"{seeds} seeds are too few. Random methods need {MIN_SEEDS}.")
    _require(entry.lines, "lines is empty")
    _check_score(entry, entry.unpatched, "unpatched")
    for line in entry.lines:
        _check_line(entry, line)
    settings = [(line.method, line.keep) for line in entry.lines]
    _require(len(settings) == len(set(settings)), "a method occurs twice at one keep")
    unmatched = {keep for _, keep in settings} - {keep for name, keep in settings if name == "random"}
    _require(not unmatched, f"the line of random is missing at keep {sorted(unmatched)}")


def _parse_entry(data: Any) -> LeaderboardEntry:
    """Return the entry of a JSON object. Raise DataError for missing or unknown fields."""
    _require(isinstance(data, Mapping), "the file must hold an object")
    if data.get("schema") != SCHEMA:
        raise DataError(f"its schema is {shorten(data.get('schema'))}, but this version reads {SCHEMA}")
    _check_fields(data, LeaderboardEntry, "")
    lines = data["lines"]
    _require(isinstance(lines, list), "lines must be a list")
    for index, line in enumerate(lines):
        _check_fields(line, Line, f"line {index}: ")
    return LeaderboardEntry(**{**data, "lines": [Line(**line) for line in lines]})


def _check_fields(data: Any, cls: type, where: str) -> None:
    _require(isinstance(data, Mapping), f"{where}must be an object")
    types = get_option_types(cls)
    _require(not (missing := sorted(types.keys() - data.keys())), f"{where}missing field {', '.join(missing)}")
    _require(not (unknown := sorted(data.keys() - types.keys())), f"{where}unknown field {', '.join(unknown)}")


def _check_types(record: LeaderboardEntry | Line, where: str = "") -> None:
    for name, hint in get_option_types(type(record)).items():
        value = getattr(record, name)
        _require(matches_type(value, hint), f"{where}{name}={shorten(value)} must be {describe_type(hint)}")


def _check_line(entry: LeaderboardEntry, line: Line) -> None:
    label = f"{line.method} at {line.keep:g}"
    is_ambiguous = isinstance(line.keep, int) and line.keep == 1
    _require(not is_ambiguous, f"{label}: keep=1 is ambiguous. Write 1.0 for all tokens.")
    known = all(part in list(Site) for part in line.site.split("+"))
    _require(known, f"{label}: site={line.site!r} is not one of {', '.join(Site)}")
    _require(len(line.method) <= 200 and line.method.isprintable(), f"{shorten(line.method)} is not a method")
    _require(set(line.marks) <= set(MARKS.values()), f"{label}: marks are {' and '.join(MARKS.values())}")
    _check_score(entry, line.score, label)


def _check_score(entry: LeaderboardEntry, score: Any, label: str) -> None:
    """Raise DataError unless the score is inside its interval.

    The interval of ungraded scores must be the Wilson interval.
    """
    _require(len(score) == 3, f"{label}: a score must be three numbers: value, low, high")
    value, low, high = score
    _require(low - _TOLERANCE <= value <= high + _TOLERANCE, f"{label}: {value} is not between {low} and {high}")
    if not METRICS[entry.metric].graded:
        _require(value <= 1, f"{label}: {value} is not a share")
        expected = wilson(round(value * entry.questions), entry.questions)
        fine = all(abs(ours - theirs) < _TOLERANCE for ours, theirs in zip((low, high), expected, strict=True))
        _require(fine, f"{label}: [{low}, {high}] is not the interval of {value} of {entry.questions} questions")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise DataError(message)
