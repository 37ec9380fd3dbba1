# SPDX-License-Identifier: Apache-2.0
"""Folder of a run of `bench` or `tune`, which allows a killed run to resume.

The folder contains config.json, predictions.jsonl and results.jsonl. predictions.jsonl has one line per pass (method,
keep and seed, or a setting of the tuner) and question, written batch by batch. The last line of a batch has its cost; a
batch without this line is incomplete and is asked again. Each process of a group writes its own file
(predictions.1.jsonl ...). `finish` merges them into one file in order. A run holds an operating system lock on the file
.lock, which is released if the leading process dies.
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
SCHEMA = 2  # schema version of the predictions
_OF_A_QUESTION = ("question", "prediction", "score", "cost")  # fields of a line that are not part of the key


class RunFolder:
    """Context of an open run folder. All processes of the group must enter it together.

    Args:
        path: The folder.
        config: Everything the results depend on. A folder with another config is rejected.
        group: Processes of the run.

    Attributes:
        results: Stored result records, the header first.

    Raises:
        RunError: If another run uses the folder, its config differs, or it cannot be read or written. Raised in all
            processes.
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
                    self._check()  # another run may have started and ended meanwhile
                valid_end = 0
                for record, end in read_lines(self.path / RESULTS):
                    self.results.append(record)
                    valid_end = end
                ends = {file.name: self._read(file) for file in sorted(self.path.glob("predictions*.jsonl"))}
                self._check_answers()
            with self.group.barrier():  # all processes read before any process writes
                if self.group.is_leader:
                    write_records(self.path / CONFIG, [self._config], indent=2)
                    self._results = stack.enter_context(JsonLinesWriter(self.path / RESULTS, valid_end))
            with self.group.barrier():  # config.json must exist before any other file
                name = PREDICTIONS if self.group.is_leader else f"predictions.{self.group.rank}.jsonl"
                self._predictions = stack.enter_context(JsonLinesWriter(self.path / name, ends.get(name, 0)))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(error_type, value, traceback)

    def batches(self, key: dict[str, Any]) -> dict[int, Batch]:
        """Return the stored batches of a pass, by the index of their first question.

        Args:
            key: Plain values that identify the pass.
        """
        return self._batches.get(_format_key(key), {})

    def add_batch(self, key: dict[str, Any], indices: Sequence[int], answers: list[str], cost: dict[str, Any]) -> None:
        """Store the answers to a batch of questions."""
        self._predictions.write(*_build_lines(key, indices, answers, cost))

    def add_result(self, record: dict[str, Any]) -> None:
        """Store a result record. Only the leader writes it."""
        if self.group.is_leader:
            self._results.write(record)

    def finish(self, passes: Sequence[tuple[dict[str, Any], dict[int, Batch], Sequence[float]]]) -> None:
        """Merge the predictions into one file, pass by pass in question order, with scores.

        Args:
            passes: For each pass its key, its batches of consecutive questions, and the score of every question.
        """
        self.group.gather(None)  # all processes have finished writing
        with self.group.barrier():
            if self.group.is_leader:
                self._join(passes)

    def _join(self, passes: Sequence[tuple[dict[str, Any], dict[int, Batch], Sequence[float]]]) -> None:
        lines = []
        for key, batches, scores in passes:
            for first, (answers, cost) in sorted(batches.items()):
                pass_lines = _build_lines(key, range(first, first + len(answers)), answers, cost)
                for line in pass_lines:
                    line["score"] = round(scores[line["question"]], 6)
                lines += pass_lines
        write_records(self.path / PREDICTIONS, lines)
        for part in self.path.glob("predictions.*.jsonl"):
            part.unlink()

    def _lock(self) -> AbstractContextManager[Any]:
        try:
            return FileLock(self.path / LOCK).acquire(timeout=0)
        except Timeout as error:
            raise RunError(
                f"Another run is writing to {self.path}. Wait for it, or use another folder with --run."
            ) from error
        except (OSError, NotImplementedError) as error:
            raise RunError(f"Cannot lock {self.path}: {getattr(error, 'strerror', None) or error}.") from error

    def _check(self) -> None:
        path = self.path / CONFIG
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                if any(not file.name.startswith((CONFIG, LOCK)) for file in self.path.iterdir()):
                    raise RunError(f"{self.path} is not empty and not a run folder. Use another folder with --run.")
                stored = self._config
            else:
                stored = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(f"Cannot use {self.path} as a run folder: {error.strerror or error}.") from error
        except ValueError as error:
            raise RunError(f"{path} is damaged: {error}.") from error
        for name in {**self._config, **stored} if isinstance(stored, dict) else ["config"]:
            ours, theirs = self._config.get(name), stored.get(name) if isinstance(stored, dict) else stored
            if ours != theirs:
                raise RunError(
                    f"{self.path} has a run with {name} {json.dumps(theirs)}, but this run has {json.dumps(ours)}. Use "
                    "another folder with --run."
                )

    def _read(self, path: Path) -> int:
        """Load the batches of a predictions file and return the end offset of the last complete batch."""
        valid_end, answers, first = 0, [], 0
        for line_number, (line, end) in enumerate(read_lines(path), 1):
            if missing := [name for name in ("question", "prediction") if name not in line]:
                raise RunError(
                    f"Line {line_number} of {path} is damaged: it lacks {' and '.join(missing)}. Remove this line, "
                    f"all later lines and {RESULTS}, and run again."
                )
            if not answers:
                first = line["question"]
            answers.append(line["prediction"])
            if "cost" in line:
                key = {name: value for name, value in line.items() if name not in _OF_A_QUESTION}
                self._batches.setdefault(_format_key(key), {})[first] = (answers, line["cost"])
                answers, valid_end = [], end
        return valid_end

    def _check_answers(self) -> None:
        """Check that the predictions contain all answers of the stored results.

        Raises:
            RunError: If answers are missing, as in a truncated file.
        """
        for record in self.results:
            if record.get("record") not in ("result", "control"):
                continue
            for seed in record.get("seeds") or [None]:
                key = {"method": record["method"], "keep": record["keep"], "seed": seed}
                num_answers = sum(len(answers) for answers, _ in self.batches(key).values())
                if num_answers < record["questions"]:
                    path = self.path / PREDICTIONS
                    raise RunError(
                        f"{path} is truncated at line {len(read_lines(path))}: it has {num_answers} of "
                        f"{record['questions']} answers of {record['method']} at keep {record['keep']:g}. Restore the "
                        f"file, or remove {self.path / RESULTS} and run the same command to ask the missing questions."
                    )


def config_of(subject: Model | BenchBackend, plan: Any, metric: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return everything that the answers of a run depend on, as plain values.

    Args:
        subject: The model or back end.
        plan: Dataclass with the settings of the run.
        metric: Name of the metric.
        about: Description of the questions.
    """
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


def _format_key(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _build_lines(
    key: dict[str, Any], indices: Sequence[int], answers: list[str], cost: dict[str, Any]
) -> list[dict[str, Any]]:
    pairs = zip(indices, answers, strict=True)
    lines = [{**key, "question": index, "prediction": answer} for index, answer in pairs]
    lines[-1]["cost"] = cost
    return lines
