# SPDX-License-Identifier: Apache-2.0
"""Read lmms-eval's results files into the numbers of the papers' table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from papers.sets import SETS
from papers.settings import Setting, same

from tokenprune.errors import OptionError, TokenPruneError

# Tasks write additional files, such as submissions/..._results.json.
_PATTERN = "[0-9]*_results.json"
Measured = dict[str, float]


class BadResultsError(TokenPruneError):
    """A results file cannot be read, or does not belong to its folder's setting."""


@dataclass
class Outcomes:
    """Numbers of all settings with results, by setting and benchmark, and notes for the reader of the table."""

    numbers: dict[str, Measured] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """Contents of one setting's folder.

    Attributes:
        numbers: Newest number of each benchmark, from the first of its tasks with a result.
        tasks: All tasks with a result.
        models: Names of the measured models.
        notes: Notes for the reader.
        broken: Reasons for files that cannot be used.
    """

    numbers: Measured = field(default_factory=dict)
    tasks: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    broken: dict[Path, str] = field(default_factory=dict)


def read_all(folder: Path, settings: Sequence[Setting]) -> Outcomes:
    """Read the folder of `run`, with a subfolder for each setting.

    Raises:
        OptionError: If the folder does not exist or lacks results of `run`.
        BadResultsError: If files cannot be used; the message lists all such files.
    """
    if not folder.is_dir():
        raise OptionError(f"{folder} is not a folder. Pass the folder of `run --out`.")
    if not any((folder / setting.name).is_dir() for setting in settings):
        raise OptionError(
            f"{folder} lacks the folders of `run --out`, such as {settings[0].name}. Pass another folder."
        )
    outcomes = {setting.name: read(folder / setting.name, setting) for setting in settings}
    if broken := [reason for outcome in outcomes.values() for reason in outcome.broken.values()]:
        raise BadResultsError("\n".join([*broken, "Run `run` again to rename these files and measure again."]))
    numbers = {name: outcome.numbers for name, outcome in outcomes.items() if outcome.numbers}
    models = sorted(set().union(*(outcome.models for outcome in outcomes.values())))
    notes = [f"Measured on {' and '.join(models)}{': not comparable' if len(models) > 1 else ''}."] if models else []
    return Outcomes(numbers, [*notes, *(note for outcome in outcomes.values() for note in outcome.notes)])


def read(folder: Path, setting: Setting) -> Outcome:
    """Read the folder of one setting. The outcome is empty without a folder."""
    outcome = Outcome()
    scores: dict[str, float] = {}
    for path in sorted(folder.rglob(_PATTERN), key=lambda path: path.name):
        try:
            data = _load(path)
            model = _model(path, data, setting)
            new = _scores(path, data)
        except BadResultsError as error:
            outcome.broken[path] = str(error)
            continue
        if data["config"].get("limit") not in (None, -1):
            outcome.notes.append(f"{path}: ignored, because it was run with --limit {data['config']['limit']}")
            continue
        scores |= new
        outcome.models.add(model)
        # lmms-eval's models catch errors and return empty answers, which count as wrong.
        if (data.get("throughput") or {}).get("avg_failed_calls"):
            outcome.notes.append(f"{path}: calls of generate failed and count as wrong answers. See its log.")
    for key, benchmark in SETS.items():
        measured = [task for task in benchmark.tasks if task in scores]
        outcome.tasks.update(measured)
        if measured:
            outcome.numbers[key] = scores[measured[0]]
        if measured and measured[0] != benchmark.tasks[0]:
            outcome.notes.append(f"{setting.name}: {benchmark.title} is from {measured[0]}, not {benchmark.tasks[0]}")
    return outcome


def _scores(path: Path, data: dict[str, Any]) -> dict[str, float]:
    """Return the number of each of our tasks in a file."""
    scores = {}
    for benchmark in SETS.values():
        for task in (task for task in benchmark.tasks if task in data["results"]):
            score = benchmark.score(data["results"][task])
            if score is None or not 0 <= score <= benchmark.limit:
                metrics = " and ".join(benchmark.metrics)
                raise BadResultsError(f"{path}: {metrics} of {task} is not between 0 and {benchmark.limit:g}")
            scores[task] = score
    return scores


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadResultsError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise BadResultsError(f"{path} is truncated or not JSON ({error})") from error
    parts = ("results", "config")
    if not isinstance(data, dict) or not all(isinstance(data.get(part), dict) for part in parts):
        raise BadResultsError(f"{path} is not a results file of lmms-eval: {' or '.join(parts)} is missing")
    if not all(isinstance(task_results, dict) for task_results in data["results"].values()):
        raise BadResultsError(f"{path} is not a results file of lmms-eval: its results are not tasks with metrics")
    return data


def _model(path: Path, data: dict[str, Any], setting: Setting) -> str:
    """Return the name of a file's model. Raises BadResultsError if the file belongs to another setting."""
    arguments = data["config"].get("model_args") or ""
    if isinstance(arguments, str):
        arguments = dict(part.split("=", 1) for part in arguments.split(",") if "=" in part)
    for name, value in setting.model_args.items():
        if name not in arguments or not same(arguments[name], value):
            raise BadResultsError(
                f"{path} is not of {setting.name}: it has {name}={arguments.get(name)} instead of {name}={value}"
            )
    return str(arguments.get("pretrained", "an unnamed model"))
