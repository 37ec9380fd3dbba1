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


def read_all(folder: Path, settings: Sequence[Setting]) -> Outcomes:
    """Read the folder that `run` wrote, one folder in it for each setting.

    Raises OptionError for a folder that is not there, BadResultsError naming every file that cannot be used.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is no folder: give the one that `run --out` wrote")
    found, bad = Outcomes(), []
    for one in settings:
        try:
            numbers, notes = read(folder / one.name, one)
        except BadResultsError as error:
            bad.append(str(error))
            continue
        found.notes += notes
        if numbers:
            found.numbers[one.name] = numbers
    if bad:
        raise BadResultsError("\n".join([*bad, "delete what is broken; `run` then measures it again"]))
    known = {one.name for one in settings}
    if not found.numbers and not any(path.name in known for path in folder.iterdir()):
        raise OptionError(f"{folder} has none of the folders that `run --out` makes, such as {settings[0].name}")
    return found


def read(folder: Path, setting: Setting) -> tuple[Measured, list[str]]:
    """Return the numbers of one setting, the newest of each benchmark, and what is odd about them.

    Raises BadResultsError for a file that cannot be used.
    """
    numbers: Measured = {}
    notes = {}
    for path in sorted(folder.rglob(_PATTERN), key=lambda path: path.name):
        data = _load(path)
        _check_run(path, data, setting)
        if data["config"].get("limit") not in (None, -1):
            notes[path] = f"{path}: run with --limit {data['config']['limit']}, not used"
            continue
        for key, one in SETS.items():
            for task in (task for task in reversed(one.tasks) if task in data["results"]):
                score = one.score(data["results"][task])
                if score is None or not 0 <= score <= one.limit:
                    metrics = " and ".join(one.metrics)
                    raise BadResultsError(f"{path}: no usable {metrics} for {task}, between 0 and {one.limit:g}")
                numbers[key] = score
                if task != one.tasks[0]:
                    notes[path, task] = f"{setting.name}: {one.title} is from {task}, not {one.tasks[0]}"
                else:
                    notes.pop((path, task), None)
        # lmms-eval's models catch errors, and take the empty answer for wrong.
        if (data.get("throughput") or {}).get("avg_failed_calls"):
            notes[path, "failed"] = f"{path}: calls of generate failed, and count as wrong answers; see its log"
    return numbers, list(notes.values())


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


def _check_run(path: Path, data: dict[str, Any], setting: Setting) -> None:
    """Results that were put into another folder would silently be another method's."""
    told = data["config"].get("model_args") or ""
    if isinstance(told, str):
        told = dict(part.split("=", 1) for part in told.split(",") if "=" in part)
    for name, value in setting.given.items():
        if name not in told or not same(told[name], value):
            raise BadResultsError(
                f"{path} is not of {setting.name}: it was run with {name}={told.get(name)}, not {name}={value}"
            )
