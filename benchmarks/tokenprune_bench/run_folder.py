# SPDX-License-Identifier: Apache-2.0
"""The folder of a run of `bench` or `tune`, from which a killed run goes on: config.json, predictions.jsonl,
results.jsonl.

predictions.jsonl has one line for each pass (method, keep, seed, or a setting of the tuner) and question, written batch
by batch; the last line of a batch holds what the batch cost, so that a batch without it was torn and is asked again.
Every process of a group writes a file of its own (predictions.1.jsonl ...), which the end of a benchmark makes one, in
order. A run holds a lock of the operating system on the folder's file .lock, which the death of its first process
releases.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from tokenprune_bench.answers import Batch
from tokenprune_bench.errors import RunError
from tokenprune_bench.group import SINGLE_PROCESS, Group
from tokenprune_bench.json_lines import JsonLinesWriter, read_lines, write_records
from tokenprune_bench.results import RESULTS

if TYPE_CHECKING:
    from tokenprune_bench.backend import BenchBackend
    from tokenprune_bench.profiling.model import Model

CONFIG, PREDICTIONS, LOCK = "config.json", "predictions.jsonl", ".lock"
SCHEMA = 2  # of the predictions
_OF_A_QUESTION = ("question", "prediction", "score", "cost")  # what a line says besides the pass it belongs to


class RunFolder:
    """Open (as a context) the folder of a run, which all processes of the group must do together.

    config: what makes the run what it is. results: the records that are there already, the header first.
    Raises RunError, in every process of the group, where another run is in the folder, where it belongs to a run with
    another config, or where it cannot be read or written.
    """

    def __init__(self, path: Path, config: dict[str, Any], group: Group = SINGLE_PROCESS) -> None:
        self.path, self.group = path, group
        self._config = json.loads(json.dumps(config))
        self.results: list[dict[str, Any]] = []
        self._batches: dict[str, dict[int, Batch]] = {}

    def __enter__(self) -> RunFolder:
        with ExitStack() as stack:
            with self.group.barrier():
                self._check()
                if self.group.is_leader:
                    stack.enter_context(self._lock())
                    self._check()  # another run may just have begun, and ended
                whole = 0
                for record, end in read_lines(self.path / RESULTS):
                    self.results.append(record)
                    whole = end
                ends = {file.name: self._read(file) for file in sorted(self.path.glob("predictions*.jsonl"))}
                self._check_answers()
            with self.group.barrier():  # nothing is written before all have read
                if self.group.is_leader:
                    write_records(self.path / CONFIG, [self._config], indent=2)
                    self._results = stack.enter_context(JsonLinesWriter(self.path / RESULTS, whole))
            with self.group.barrier():  # a folder with anything in it has a config
                name = PREDICTIONS if self.group.is_leader else f"predictions.{self.group.rank}.jsonl"
                self._predictions = stack.enter_context(JsonLinesWriter(self.path / name, ends.get(name, 0)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, value, at)

    def batches(self, place: dict[str, Any]) -> dict[int, Batch]:
        """Return the batches of a pass that were answered before, by the number of their first question. place: plain
        values that name the pass."""
        return self._batches.get(_key(place), {})

    def add_batch(
        self, place: dict[str, Any], numbers: Sequence[int], answers: list[str], cost: dict[str, Any]
    ) -> None:
        """Write the answers to a batch, the questions of these numbers."""
        self._predictions.write(*_lines(place, numbers, answers, cost))

    def add_result(self, record: dict[str, Any]) -> None:
        """Write a record of the results: a process that does not lead leaves that to the one that does."""
        if self.group.is_leader:
            self._results.write(record)

    def finish(self, passes: Sequence[tuple[dict[str, Any], dict[int, Batch], Sequence[float]]]) -> None:
        """Make the predictions one file, pass by pass in the order of the questions, each with its score: for each pass
        its name, the batches of consecutive questions, and the score of every question."""
        self.group.gather(None)  # no process writes a part any more
        with self.group.barrier():
            if self.group.is_leader:
                self._join(passes)

    def _join(self, passes: Sequence[tuple[dict[str, Any], dict[int, Batch], Sequence[float]]]) -> None:
        lines = []
        for place, batches, scores in passes:
            for first, (answers, cost) in sorted(batches.items()):
                made = _lines(place, range(first, first + len(answers)), answers, cost)
                for line in made:
                    line["score"] = round(scores[line["question"]], 6)
                lines += made
        write_records(self.path / PREDICTIONS, lines)
        for part in self.path.glob("predictions.*.jsonl"):
            part.unlink()

    def _lock(self) -> AbstractContextManager[Any]:
        try:
            return FileLock(self.path / LOCK).acquire(timeout=0)
        except Timeout as error:
            raise RunError(
                f"another run is writing to {self.path}: wait for it, or name another one with --run"
            ) from error
        except (OSError, NotImplementedError) as error:
            raise RunError(f"cannot lock {self.path}: {getattr(error, 'strerror', None) or error}") from error

    def _check(self) -> None:
        path = self.path / CONFIG
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(not file.name.startswith((CONFIG, LOCK)) for file in self.path.iterdir()):
                    raise RunError(f"{self.path} is not empty and no folder of a run: name another one with --run")
                found = self._config
            else:
                found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(f"cannot use {self.path} as the folder of a run: {error.strerror or error}") from error
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}") from error
        for name in {**self._config, **found} if isinstance(found, dict) else ["config"]:
            ours, theirs = self._config.get(name), found.get(name) if isinstance(found, dict) else found
            if ours != theirs:
                raise RunError(
                    f"{self.path} holds a run with {name} {json.dumps(theirs)}, and this one has {json.dumps(ours)}: "
                    "name another folder with --run"
                )

    def _read(self, path: Path) -> int:
        """Take up the batches in a file of predictions; returns the place where the last whole one ends."""
        whole, answers, first = 0, [], 0
        for number, (line, end) in enumerate(read_lines(path), 1):
            if missing := [name for name in ("question", "prediction") if name not in line]:
                raise RunError(
                    f"line {number} of {path} is damaged, it has no {' and no '.join(missing)}: remove it and what "
                    f"follows, and {RESULTS} beside it, and run again"
                )
            if not answers:
                first = line["question"]
            answers.append(line["prediction"])
            if "cost" in line:
                place = {name: value for name, value in line.items() if name not in _OF_A_QUESTION}
                self._batches.setdefault(_key(place), {})[first] = (answers, line["cost"])
                answers, whole = [], end
        return whole

    def _check_answers(self) -> None:
        """Raise RunError for a result whose answers are not all in the predictions, as of a file that was cut."""
        for record in self.results:
            if record.get("record") not in ("result", "control"):
                continue
            for seed in record.get("seeds") or [None]:
                place = {"method": record["method"], "keep": record["keep"], "seed": seed}
                there = sum(len(answers) for answers, _ in self.batches(place).values())
                if there < record["questions"]:
                    path = self.path / PREDICTIONS
                    raise RunError(
                        f"{path} is cut: it ends at line {len(read_lines(path))}, and of {record['method']} at keep "
                        f"{record['keep']:g} it holds {there} of {record['questions']} answers that {RESULTS} counts. "
                        f"Put the whole file back; or remove {self.path / RESULTS}, and the same command asks what is "
                        "missing"
                    )


def config_of(subject: Model | BenchBackend, plan: Any, metric: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return what the answers of a run depend on, as plain values. plan: a dataclass of what is run."""
    from tokenprune_bench.backend import get_backend

    backend = get_backend(subject)
    environment = backend.environment()
    known = ("python", "torch", "transformers", "vllm", "tokenprune")
    versions = {name: environment[name] for name in known if name in environment}
    names = ("engine", "engine_args", "model", "model_type", "device", "dtype", "attention")
    return {
        "schema": SCHEMA,
        **{name: environment[name] for name in names if name in environment},
        "fingerprint": backend.fingerprint(),
        "data": "shipped",
        **about,
        "metric": metric,
        **asdict(plan),
        "suffix": backend.suffix,
        "max_new_tokens": backend.max_new_tokens,
        "versions": versions,
    }


def _key(place: dict[str, Any]) -> str:
    return json.dumps(place, sort_keys=True)


def _lines(
    place: dict[str, Any], numbers: Sequence[int], answers: list[str], cost: dict[str, Any]
) -> list[dict[str, Any]]:
    pairs = zip(numbers, answers, strict=True)
    lines = [{**place, "question": number, "prediction": answer} for number, answer in pairs]
    lines[-1]["cost"] = cost
    return lines
