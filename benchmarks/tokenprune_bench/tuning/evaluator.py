# SPDX-License-Identifier: Apache-2.0
"""The answers of one model to the tuner's questions, and what they cost, through a back end of the bench."""

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
from tokenprune_bench.asking import Asking
from tokenprune_bench.backend import BenchBackend, backend_of
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.group import ALONE, Group
from tokenprune_bench.metrics import Metric, metric_named
from tokenprune_bench.profiling.cost import record
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.run_folder import RunFolder
from tokenprune_bench.tuning.objective import WORK

_PREDICTED = 8  # questions that the closed forms are asked about


@dataclass(frozen=True)
class Search:
    """The search settings that a tuner's run folder records beside model and questions: other candidates, or another
    seed, would cut the questions into other batches."""

    candidates: list[dict[str, Any]]
    seed: int = 0
    batch_size: int = 32
    stacks: int = 0


class Evaluator:
    """The answers to numbered questions, unpatched (candidate None) or patched.

    subject: a model, or another back end that answers. questions: of `bench.data` or `bench.heldout`. metric: a name
    out of `bench.metrics`, default the back end's; scores must lie in [0, 1]. folder: where answers are kept, and from
    which a killed run goes on. group: the processes that share the work; each has all answers.
    Questions are asked in chunks, sequences of their numbers; all candidates must get the same ones for their costs to
    compare. Raises OptionError for CIDEr, DataError for questions that cannot be asked, UnsupportedSetupError for a
    server of whose model the config is not at hand.
    """

    def __init__(
        self,
        subject: Model | BenchBackend,
        questions: Sequence[Any],
        metric: str | None = None,
        *,
        batch_size: int = 32,
        folder: RunFolder | None = None,
        group: Group = ALONE,
    ) -> None:
        self.backend, self.questions = backend_of(subject), list(questions)
        self.metric = tunable_metric(metric or self.backend.metric)
        self.group, self.videos = group, any(one.is_video for one in questions)
        self.backend.begin(self.questions)
        self.environment = self.backend.environment()
        if self.environment["model_type"] is None:
            raise UnsupportedSetupError(
                f"what settings save follows from the config of {self.environment['model']}, which is not at hand "
                "here: tune where the model's folder is, under the same path"
            )
        self.batch_size = batch_size
        self._asking = Asking(self.backend, self.questions, batch_size, folder, group)
        self._scores: dict[Setting | None, dict[int, float]] = {}
        self._costs: dict[Setting | None, dict[int, dict[str, Any]]] = {}

    @property
    def kinds(self) -> list[str]:
        """The kind of each question."""
        return [question.kind for question in self.questions]

    @property
    def groups(self) -> list[Any]:
        """The images of each question: questions about the same images have equal entries."""
        return [_seen(question) for question in self.questions]

    def ask(
        self, candidate: Setting | None, chunk: Sequence[int], on_batch: Callable[[int], None] | None = None
    ) -> None:
        """Have a chunk answered, unless it was before. on_batch: is called with the size of each batch.

        Raises what `patch` raises for a candidate that does not fit the model.
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
        for numbers in batches:
            answers, self._costs.setdefault(candidate, {})[numbers[0]] = answered[numbers[0]]
            accepted = [self.questions[number].answers for number in numbers]
            scores.update(zip(numbers, self.metric.score(answers, accepted), strict=True))
        note(left)  # what other processes asked, or a run before this one

    def is_cached(self, candidate: Setting | None, chunk: Sequence[int]) -> bool:
        """Return whether a chunk was answered before, in this run or in the one of the folder."""
        return self._asking.is_cached(_place(candidate), candidate, chunk)

    def answered(self, candidate: Setting | None) -> set[int]:
        """Return the numbers of the questions that were asked."""
        return set(self._scores.get(candidate, ()))

    def scores(self, candidate: Setting | None, numbers: Sequence[int]) -> np.ndarray:
        """Return the scores of questions that were asked, float64."""
        mine = self._scores[candidate]
        return np.array([mine[number] for number in numbers])

    def cost(self, candidate: Setting) -> dict[str, Any]:
        """Return `cost.record` of all that this candidate was asked, against the unpatched model on the same."""
        asked, whole = self._scores[candidate], self._costs[None]
        unpatched = _total(cost for first, cost in whole.items() if first in asked)
        return record(_total(self._costs[candidate].values()), unpatched)

    @cached_property
    def _closed(self) -> tuple[CostModel, list[Load]] | None:
        step = max(1, len(self.questions) // _PREDICTED)
        return self.backend.closed_forms(self.questions[::step][:_PREDICTED])

    def predict(self, candidate: Setting) -> dict[str, float]:
        """Return what the closed forms say that a candidate spends, as shares of the unpatched model's: "work",
        "flops", "tokens", "kv", "tower", and the tower's share of the unpatched work, "tower_share". Of a few
        questions, evenly chosen; {} where the model, or the candidate, does not tell ahead."""
        if self._closed is None:
            return {}
        model, loads = self._closed
        try:
            costs = [model.predict(load, *candidate.steps()) for load in loads]
        except TokenPruneError:
            return {}  # asking it raises the reason
        wholes = [model.compute_cost(load) for load in loads]

        def share(name: str) -> float:
            whole = sum(getattr(cost, name) for cost in wholes)
            return sum(getattr(cost, name) for cost in costs) / whole if whole else 0.0

        shares = {name: share(name) for name in ("tokens", "tower")}
        shares |= {WORK: share("flops"), "flops": share("decoder"), "kv": share("cache")}
        return shares | {"tower_share": sum(cost.tower for cost in wholes) / sum(cost.flops for cost in wholes)}

    def time(self, candidate: Setting, numbers: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        """Return the times of `BenchBackend.timing` on the first of some questions, with the processor; only the first
        token counts here. batch: also those of `BenchBackend.batch_timing` on a batch of them. The first process of the
        group measures, and all get the same."""
        timing, failure = None, None
        if self.group.leads:
            try:
                timing = self.backend.timing(candidate, self.questions[numbers[0]], repeats, 2, processor=True)
                if batch:
                    rows = [self.questions[number] for number in numbers[: self.batch_size]]
                    timing |= self.backend.batch_timing(candidate, rows, repeats)
            except (DataError, RunError):
                raise
            except TokenPruneError as error:
                failure = error
        timing, failure = self.group.gather((timing, failure))[0]
        if failure is not None:
            raise failure
        return timing


def tunable_metric(name: str) -> Metric:
    """Return a metric; raises OptionError for CIDEr, and what `metric_named` raises."""
    if name == "cider":
        raise OptionError(
            "cider cannot be tuned for: a score goes up to 10 and depends on all answers at once, and the test needs "
            "scores in [0, 1] of one answer each; take anls or f1"
        )
    return metric_named(name)


def _place(candidate: Setting | None) -> dict[str, Any]:
    """Return plain values that name a candidate in the folder of a run."""
    return {"setting": None if candidate is None else candidate.to_json()}


def _total(costs: Any) -> Stats:
    return sum((Stats(**cost) for cost in costs), Stats())


def _seen(question: Any) -> Any:
    if hasattr(question, "path"):
        return str(question.path)
    return tuple((one.name, one.size) for one in (*question.sources, *filter(None, [question.video_source])))


__all__ = ["Evaluator", "Search", "tunable_metric"]
