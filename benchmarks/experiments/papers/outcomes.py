# SPDX-License-Identifier: Apache-2.0
"""What lmms-eval measured: its results files, read into the numbers of the papers' table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papers.sets import SETS
from papers.settings import Setting, same

from tokenprune.errors import OptionError, TokenPruneError

# The tasks write files of their own beside it (submissions/..._results.json).
_PATTERN = "[0-9]*_results.json"
Measured = dict[str, float]


class BadResultsError(TokenPruneError):
    """A results file cannot be read, or is of another run than its folder says."""


@dataclass
class Outcomes:
    """numbers: of each setting that has any, by benchmark. notes: what a reader of the table should know."""

    numbers: dict[str, Measured] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What one setting's folder holds.

    numbers: of each benchmark, the newest from the first of its tasks that has one. tasks: all that have one. models:
    what was measured. notes: what is odd. broken: files that cannot be used, with the reasons.
    """

    numbers: Measured = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)


def read_all(folder: Path, settings: Sequence[Setting]) -> Outcomes:
    """Read the folder that `run` wrote, one folder in it for each setting.

    Raises OptionError for a folder that is not there, BadResultsError naming every file that cannot be used.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder: give the one that `run --out` wrote")
    if not any((folder / one.name).is_dir() for one in settings):
        raise OptionError(f"{folder} has none of the folders that `run --out` makes, such as {settings[0].name}")
    read_ones = {one.name: read(folder / one.name, one) for one in settings}
    if broken := [reason for one in read_ones.values() for reason in one.broken.values()]:
        raise BadResultsError("\n".join([*broken, "`run` sets such files aside and measures again; or delete them"]))
    numbers = {name: one.numbers for name, one in read_ones.items() if one.numbers}
    models = sorted(set().union(*(one.models for one in read_ones.values())))
    notes = [f"Measured on {' and '.join(models)}{': not comparable' if len(models) > 1 else ''}."] if models else []
    return Outcomes(numbers, [*notes, *(note for one in read_ones.values() for note in one.notes)])


def read(folder: Path, setting: Setting) -> Outcome:
    """Read the folder of one setting, empty where there is none."""
    found = Outcome()
    scores: dict[str, float] = {}
    for path in sorted(folder.rglob(_PATTERN), key=lambda path: path.name):
        try:
            data = _load(path)
            model = _model(path, data, setting)
            new = _scores(path, data)
        except BadResultsError as error:
            found.broken[path] = str(error)
            continue
        if data["config"].get("limit") not in (None, -1):
            found.notes.append(f"{path}: run with --limit {data['config']['limit']}, not used")
            continue
        scores |= new
        found.models.add(model)
        # lmms-eval's models catch errors, and take the empty answer for wrong.
        if (data.get("throughput") or {}).get("avg_failed_calls"):
            found.notes.append(f"{path}: calls of generate failed, and count as wrong answers; see its log")
    for key, one in SETS.items():
        measured = [task for task in one.tasks if task in scores]
        found.tasks.update(measured)
        if measured:
            found.numbers[key] = scores[measured[0]]
        if measured and measured[0] != one.tasks[0]:
            found.notes.append(f"{setting.name}: {one.title} is from {measured[0]}, not {one.tasks[0]}")
    return found


def _scores(path: Path, data: dict[str, Any]) -> dict[str, float]:
    """The number of each task of ours in a file."""
    found = {}
    for one in SETS.values():
        for task in (task for task in one.tasks if task in data["results"]):
            score = one.score(data["results"][task])
            if score is None or not 0 <= score <= one.limit:
                metrics = " and ".join(one.metrics)
                raise BadResultsError(f"{path}: no usable {metrics} for {task}, between 0 and {one.limit:g}")
            found[task] = score
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadResultsError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise BadResultsError(f"{path} is cut short or no JSON ({error})") from error
    parts = ("results", "config")
    if not isinstance(data, dict) or not all(isinstance(data.get(part), dict) for part in parts):
        raise BadResultsError(f"{path} is no results file of lmms-eval: it lacks {' or '.join(parts)}")
    if not all(isinstance(one, dict) for one in data["results"].values()):
        raise BadResultsError(f"{path} is no results file of lmms-eval: its results are not tasks with metrics")
    return data


def _model(path: Path, data: dict[str, Any], setting: Setting) -> str:
    """Return which model a file is of; raises where that is another setting's: its numbers would pass for ours."""
    told = data["config"].get("model_args") or ""
    if isinstance(told, str):
        told = dict(part.split("=", 1) for part in told.split(",") if "=" in part)
    for name, value in setting.given.items():
        if name not in told or not same(told[name], value):
            raise BadResultsError(
                f"{path} is not of {setting.name}: it was run with {name}={told.get(name)}, not {name}={value}"
            )
    return str(told.get("pretrained", "a model that is not named"))
