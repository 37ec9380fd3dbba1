# SPDX-License-Identifier: Apache-2.0
"""Answers of a model to the tuner's questions, and their cost, measured by a back end of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tokenprune.errors import OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load
from tokenprune.statistics import Stats
from tokenprune_bench.backend import BenchBackend, get_backend
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.group import SINGLE_PROCESS, Group
from tokenprune_bench.metrics import Metric, get_metric
from tokenprune_bench.profiling.cost import build_cost_record
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.question_runner import QuestionRunner
from tokenprune_bench.run_folder import RunFolder
from tokenprune_bench.tuning.objective import WORK

_PREDICTED = 8  # number of questions for the prediction of costs


@dataclass(frozen=True)
class Search:
    """Search settings that the run folder of a tuner records.

    Attributes:
        candidates: All candidates as JSON.
        seed: Seed of the split of the questions.
        batch_size: Largest number of questions per batch.
        stacks: Number of stacks that may be proposed.
    """

    candidates: list[dict[str, Any]]
    seed: int = 0
    batch_size: int = 32
    stacks: int = 0


class Evaluator:
    """Scores and costs of a model, unpatched (candidate None) or patched, on indexed questions.

    Args:
        subject: A model or a back end.
        questions: Questions with accepted answers.
        metric: Name of the metric. None selects the metric of the back end.
        batch_size: Largest number of questions per batch.
        folder: Run folder to store answers in and to resume from.
        group: Processes that share the batches.

    Raises:
        UnsupportedSetupError: If the config of the model is not available.
        DataError: If the back end cannot ask some of the questions.
    """

    def __init__(
        self,
        subject: Model | BenchBackend,
        questions: Sequence[Any],
        metric: str | None = None,
        *,
        batch_size: int = 32,
        folder: RunFolder | None = None,
        group: Group = SINGLE_PROCESS,
    ) -> None:
        self.backend, self.questions = get_backend(subject), list(questions)
        self.metric = get_tunable_metric(metric or self.backend.metric)
        self.group, self.videos = group, any(question.is_video for question in questions)
        self.backend.begin(self.questions)
        self.environment = self.backend.environment()
        if self.environment["model_type"] is None:
            raise UnsupportedSetupError(
                f"The config of {self.environment['model']} is not available, so savings cannot be computed. Tune on a "
                "machine that has the model's folder under the same path."
            )
        self.batch_size = batch_size
        self._asking = QuestionRunner(self.backend, self.questions, batch_size, folder, group)
        self._scores: dict[Setting | None, dict[int, float]] = {}
        self._costs: dict[Setting | None, dict[int, dict[str, Any]]] = {}

    @property
    def kinds(self) -> list[str]:
        """Kind of each question."""
        return [question.kind for question in self.questions]

    @property
    def groups(self) -> list[Any]:
        """Image sources of each question. Questions about the same images have equal entries."""
        return [_get_media_key(question) for question in self.questions]

    def ask(
        self, candidate: Setting | None, chunk: Sequence[int], on_batch: Callable[[int], None] | None = None
    ) -> None:
        """Answer a chunk of questions, except those with a stored answer.

        Args:
            candidate: The setting, or None for the unpatched model.
            chunk: Indices of the questions.
            on_batch: Called with the size of each batch.

        Raises:
            TokenPruneError: If the candidate does not fit the model.
        """
        left = len(chunk)

        def note(size: int) -> None:
            nonlocal left
            left -= size
            if on_batch is not None and size:
                on_batch(size)

        scores = self._scores.setdefault(candidate, {})
        batches = self._asking.batches(candidate, chunk)
        answered = self._asking.ask(_place(candidate), candidate, chunk, note)
        for indices in batches:
            answers, self._costs.setdefault(candidate, {})[indices[0]] = answered[indices[0]]
            accepted = [self.questions[index].answers for index in indices]
            scores.update(zip(indices, self.metric.score(answers, accepted), strict=True))
        note(left)  # answered by other processes, or by an earlier run

    def is_cached(self, candidate: Setting | None, chunk: Sequence[int]) -> bool:
        """Return True if all questions of a chunk have stored answers."""
        return self._asking.is_cached(_place(candidate), candidate, chunk)

    def answered_questions(self, candidate: Setting | None) -> set[int]:
        """Return the indices of the answered questions."""
        return set(self._scores.get(candidate, ()))

    def scores(self, candidate: Setting | None, indices: Sequence[int]) -> np.ndarray:
        """Return the scores of answered questions, float64."""
        mine = self._scores[candidate]
        return np.array([mine[index] for index in indices])

    def cost(self, candidate: Setting) -> dict[str, Any]:
        """Return the cost record of a candidate, relative to the unpatched model on the same questions."""
        asked = self._scores[candidate]
        unpatched = _sum_costs(cost for first, cost in self._costs[None].items() if first in asked)
        return build_cost_record(_sum_costs(self._costs[candidate].values()), unpatched)

    @cached_property
    def _closed(self) -> tuple[CostModel, list[Load]] | None:
        step = max(1, len(self.questions) // _PREDICTED)
        return self.backend.build_cost_model(self.questions[::step][:_PREDICTED])

    def predict(self, candidate: Setting) -> dict[str, float]:
        """Predict the cost shares of a candidate from closed forms, averaged over a few questions.

        Returns:
            Shares of the unpatched cost under "work", "flops", "tokens", "kv" and "tower", and the tower's share of the
            unpatched FLOPs under "tower_share". Empty if the cost of the model or of the candidate is not known in
            advance.
        """
        if self._closed is None:
            return {}
        model, loads = self._closed
        try:
            costs = [model.predict(load, *candidate.steps()) for load in loads]
        except TokenPruneError:
            return {}  # `ask` raises the reason
        unpatched = [model.compute_cost(load) for load in loads]

        def share(name: str) -> float:
            total = sum(getattr(cost, name) for cost in unpatched)
            return sum(getattr(cost, name) for cost in costs) / total if total else 0.0

        shares = {name: share(name) for name in ("tokens", "tower")}
        shares |= {WORK: share("flops"), "flops": share("decoder"), "kv": share("cache")}
        return shares | {"tower_share": sum(cost.tower for cost in unpatched) / sum(cost.flops for cost in unpatched)}

    def time(self, candidate: Setting, indices: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        """Measure the time to first token of a candidate on the first of the questions, including the processor.

        The first process of the group measures; all processes return its result.

        Args:
            candidate: The setting.
            indices: Indices of the questions.
            repeats: Number of timed runs.
            batch: Also measure the time of a batch of these questions.
        """
        timing, failure = None, None
        if self.group.is_leader:
            try:
                timing = self.backend.timing(candidate, self.questions[indices[0]], repeats, 2, processor=True)
                if batch:
                    rows = [self.questions[index] for index in indices[: self.batch_size]]
                    timing |= self.backend.batch_timing(candidate, rows, repeats)
            except (DataError, RunError):
                raise
            except TokenPruneError as error:
                failure = error
        timing, failure = self.group.gather((timing, failure))[0]
        if failure is not None:
            raise failure
        return timing


def get_tunable_metric(name: str) -> Metric:
    """Return a metric by name.

    Raises:
        OptionError: If the metric does not exist, or is CIDEr.
    """
    if name == "cider":
        raise OptionError(
            "cider cannot be tuned: its scores go up to 10 and depend on all answers at once. Use a metric with one "
            "score in [0, 1] per answer, such as anls or f1."
        )
    return get_metric(name)


def _place(candidate: Setting | None) -> dict[str, Any]:
    """Return the key of a candidate in the run folder."""
    return {"setting": None if candidate is None else candidate.to_json()}


def _sum_costs(costs: Any) -> Stats:
    return sum((Stats(**cost) for cost in costs), Stats())


def _get_media_key(question: Any) -> Any:
    if hasattr(question, "path"):
        return str(question.path)
    return tuple(
        (question.name, question.size) for question in (*question.sources, *filter(None, [question.video_source]))
    )


__all__ = ["Evaluator", "Search", "get_tunable_metric"]
