# SPDX-License-Identifier: Apache-2.0
"""Check entries of the leaderboard: their schema, and that their numbers fit together."""

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
from tokenprune_bench.leaderboard.entry import LEAST_QUESTIONS, LEAST_SEEDS, SCHEMA, LeaderboardEntry, Line
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.results import MARKS
from tokenprune_bench.significance import wilson

_LONGEST = {"by": 80, "note": 300, "model": 120, "data": 120}  # characters
_NEAR = 1e-5  # numbers are rounded


def read_entry(path: Path) -> LeaderboardEntry:
    """Read and check a file of the leaderboard; raises DataError, with the file's name, for anything wrong."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    try:
        entry = _entry(given)
        check_entry(entry)
        _require(path.name == file_name(entry), f"its name must be {file_name(entry)}")
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return entry


def file_name(entry: LeaderboardEntry) -> str:
    """Return the name of an entry's file: the model, and the digest of its run."""
    return f"{re.sub(r'[^a-z0-9.]+', '-', entry.model.lower()).strip('-.')}-{entry.run}.json"


def as_plain(entry: LeaderboardEntry) -> dict[str, Any]:
    """Return an entry as JSON has it."""
    return asdict(entry)


def check_entry(entry: LeaderboardEntry) -> None:
    """Raise DataError for an entry whose fields are of another type than they declare, or do not fit together."""
    _check_types(entry)
    for line in entry.lines:
        _check_types(line, f"{shorten(getattr(line, 'method', line))}: ")
    for name, longest in _LONGEST.items():
        text = getattr(entry, name)
        _require(len(text) <= longest and text.isprintable(), f"{name} is one line of at most {longest} characters")
    _require(entry.by.strip() and entry.model.strip(), "by and model must say something")
    _require(re.fullmatch(r"[0-9a-f]{12}", entry.run), f"run={entry.run!r} must be twelve hexadecimal digits")
    try:
        datetime.datetime.fromisoformat(entry.date)
    except ValueError:
        raise DataError(f"date={entry.date!r} is no date as in 2026-11-22T19:00:42+00:00") from None
    plain = all(isinstance(one, str) and one.isprintable() and len(one) < 40 for one in entry.versions.values())
    _require(plain and "tokenprune" in entry.versions, "versions must name that of tokenprune")
    engine = "vllm" if entry.engine == "vllm" else "transformers"
    _require(engine in entry.versions, f"versions must name that of {engine}")
    _require(entry.metric in METRICS, f"metric={entry.metric!r} is none of {', '.join(METRICS)}")
    _require(
        entry.questions >= LEAST_QUESTIONS, f"{entry.questions} questions are too few: ask {LEAST_QUESTIONS} or more"
    )
    seeds = len(set(entry.seeds))
    _require(seeds >= LEAST_SEEDS, f"{seeds} seeds are too few: what draws at random takes {LEAST_SEEDS}")
    _require(entry.lines, "it has no lines")
    _check_score(entry, entry.unpatched, "unpatched")
    for line in entry.lines:
        _check_line(entry, line)
    places = [(line.method, line.keep) for line in entry.lines]
    _require(len(places) == len(set(places)), "a method stands there twice at one keep")
    alone = {keep for _, keep in places} - {keep for name, keep in places if name == "random"}
    _require(not alone, f"at keep {sorted(alone)} there is no line of random to compare with")


def _entry(given: Any) -> LeaderboardEntry:
    """Return what a file holds, with a Line for each of its lines; raises DataError where it has other fields."""
    _require(isinstance(given, Mapping), "it must be an object")
    if given.get("schema") != SCHEMA:
        raise DataError(f"its schema is {shorten(given.get('schema'))}, and this version reads {SCHEMA}")
    _check_fields(given, LeaderboardEntry, "")
    lines = given["lines"]
    _require(isinstance(lines, list), "lines must be a list")
    for number, line in enumerate(lines):
        _check_fields(line, Line, f"line {number}: ")
    return LeaderboardEntry(**{**given, "lines": [Line(**line) for line in lines]})


def _check_fields(given: Any, cls: type, where: str) -> None:
    _require(isinstance(given, Mapping), f"{where}it must be an object")
    wanted = get_option_types(cls)
    _require(not (missing := sorted(wanted.keys() - given.keys())), f"{where}it lacks {', '.join(missing)}")
    _require(not (unknown := sorted(given.keys() - wanted.keys())), f"{where}it has no field {', '.join(unknown)}")


def _check_types(one: LeaderboardEntry | Line, where: str = "") -> None:
    for name, hint in get_option_types(type(one)).items():
        value = getattr(one, name)
        _require(matches_type(value, hint), f"{where}{name}={shorten(value)} must be {describe_type(hint)}")


def _check_line(entry: LeaderboardEntry, line: Line) -> None:
    what = f"{line.method} at {line.keep:g}"
    one = isinstance(line.keep, int) and line.keep == 1
    _require(not one, f"{what}: keep=1 is ambiguous. Use 1.0 to keep all tokens.")
    known = all(part in list(Site) for part in line.site.split("+"))
    _require(known, f"{what}: site={line.site!r} is none of {', '.join(Site)}")
    _require(len(line.method) <= 200 and line.method.isprintable(), f"{shorten(line.method)} is no method")
    _require(set(line.marks) <= set(MARKS.values()), f"{what}: marks are {' and '.join(MARKS.values())}")
    _check_score(entry, line.score, what)


def _check_score(entry: LeaderboardEntry, score: Any, what: str) -> None:
    """Raise DataError unless a score lies in its interval, which of shares of right answers is Wilson's."""
    _require(len(score) == 3, f"{what}: a score is three numbers, with the ends of its interval")
    value, low, high = score
    _require(low - _NEAR <= value <= high + _NEAR, f"{what}: {value} does not lie between {low} and {high}")
    if not METRICS[entry.metric].graded:
        _require(value <= 1, f"{what}: {value} is no share")
        wanted = wilson(round(value * entry.questions), entry.questions)
        fine = all(abs(ours - theirs) < _NEAR for ours, theirs in zip((low, high), wanted, strict=True))
        _require(fine, f"{what}: [{low}, {high}] is not the interval of {value} of {entry.questions} questions")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise DataError(message)
