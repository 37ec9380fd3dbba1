# SPDX-License-Identifier: Apache-2.0
"""Puts questions to the model under a setting, and remembers: no question is asked twice of one candidate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import tokenprune
from tokenprune.base import ResizeMethod, Site
from tokenprune.bench.cost import Cost, Prefill
from tokenprune.bench.lines import Lines, read_lines
from tokenprune.bench.metrics import Metric, metric_named
from tokenprune.bench.model import Subject
from tokenprune.bench.timing import compare
from tokenprune.config import SCHEMA
from tokenprune.errors import OptionError, RunError
from tokenprune.fingerprint import fingerprint
from tokenprune.tuning.candidates import Candidate

Step = Callable[[str, int, int], None]
_REUSED_BYTES = 2**29


class Panel:
    """The answers of one model to numbered questions, unpatched (candidate None) or patched.

    questions: of `bench.data` or `bench.heldout`. metric: a name out of `bench.metrics`; scores must lie in [0, 1].
    Questions are asked in chunks, tuples of their numbers; all candidates must get the same ones for their costs to
    compare. journal: a file of JSON lines that is written chunk by chunk, and from which a killed run goes on. about:
    tells questions and chunks from others. Raises OptionError for CIDEr, RunError for the journal of another run.
    """

    def __init__(
        self,
        subject: Subject,
        questions: Sequence[Any],
        metric: str = "exact",
        *,
        batch_size: int = 32,
        journal: Path | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self.subject, self.questions, self.metric = subject, list(questions), tunable_metric(metric)
        self.batch_size, self.films = batch_size, any(one.is_film for one in questions)
        self._scores: dict[Candidate | None, dict[int, float]] = {None: {}}
        self._costs: dict[Candidate | None, dict[tuple[int, ...], dict[str, Any]]] = {None: {}}
        self._inputs: dict[tuple[int, ...], dict[str, Any]] = {}
        self._inputs_bytes = 0
        self._journal: Lines | None = None
        if journal is not None:
            self._resume(journal, about or {})

    def __enter__(self) -> Panel:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._journal is not None:
            self._journal.__exit__(*error)

    @property
    def kinds(self) -> list[str]:
        """The kind of each question."""
        return [question.kind for question in self.questions]

    @property
    def groups(self) -> list[Any]:
        """What each question is about: those about the same pictures are equal."""
        return [_seen(question) for question in self.questions]

    def ask(self, candidate: Candidate | None, chunk: Sequence[int], told: Callable[[int], None] | None = None) -> None:
        """Have a chunk answered, unless it was before. told: is called with the size of each batch.

        Raises what `patch` raises for a candidate that does not fit the model.
        """
        chunk = tuple(chunk)
        if self.knows(candidate, chunk):
            if told is not None:
                told(len(chunk))
            return
        answers, cost = [], Cost()
        with self._patched(candidate):
            for batch in self._batches(candidate, chunk):
                inputs = self._made(candidate, batch)
                with Prefill(self.subject) as prefill:
                    answers += self.subject.generate(inputs)
                cost.add(self.subject, inputs, prefill.kv_bytes if candidate is None else None)
                if told is not None:
                    told(len(batch))
        scores = self.metric.score(answers, [self.questions[number].answers for number in chunk])
        self._add(candidate, chunk, scores, asdict(cost))
        if self._journal is not None:
            setting = None if candidate is None else candidate.setting
            line = {"setting": setting, "questions": chunk, "answers": answers, "scores": scores, "cost": asdict(cost)}
            self._journal.write(line)

    def knows(self, candidate: Candidate | None, chunk: Sequence[int]) -> bool:
        """Whether a chunk was answered before, in this run or in the one of the journal."""
        return tuple(chunk) in self._costs.get(candidate, {})

    def scores(self, candidate: Candidate | None, numbers: Sequence[int]) -> np.ndarray:
        """Return the scores of questions that were asked, float64."""
        mine = self._scores[candidate]
        return np.array([mine[number] for number in numbers])

    def cost(self, candidate: Candidate) -> dict[str, Any]:
        """Return `Cost.record` over all that this candidate was asked, against the unpatched model on the same."""
        mine = self._costs[candidate]
        return Cost.total(mine.values()).record(Cost.total(self._costs[None][chunk] for chunk in mine))

    def time(self, candidate: Candidate, number: int, repeats: int) -> dict[str, Any]:
        """Return what `bench.timing.compare` measures on one question, of which only the first token counts here."""
        return compare(self.subject, lambda: self._patched(candidate), lambda: self._asked([number]), repeats, 2)

    def _patched(self, candidate: Candidate | None) -> AbstractContextManager[Any]:
        if candidate is None:
            return nullcontext()
        pixels = any(method.site is Site.PRE_ENCODER for method in candidate.methods)
        more = {"processor": self.subject.processor} if pixels else {}
        config = {"schema": SCHEMA, "setting": candidate.setting}
        return tokenprune.patched(self.subject.model, config=config, guard="off", **more)

    def _batches(self, candidate: Candidate | None, chunk: tuple[int, ...]) -> Iterator[list[int]]:
        """A video goes alone, and so does every picture if a method sizes it by what it shows: in a batch, LLaVA's
        processor would make all of them one size."""
        alone = candidate is not None and any(
            isinstance(method, ResizeMethod) and method.by_content for method in candidate.methods
        )
        batch: list[int] = []
        for number in chunk:
            film = self.questions[number].is_film
            if batch and (alone or film or len(batch) == self.batch_size or self.questions[batch[0]].is_film):
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    def _made(self, candidate: Candidate | None, batch: list[int]) -> dict[str, Any]:
        if candidate is not None and any(method.site is Site.PRE_ENCODER for method in candidate.methods):
            return self._asked(batch)  # the processor is another one now
        key = tuple(batch)
        if key not in self._inputs:
            inputs = self._asked(batch)
            size = sum(value.numel() * value.element_size() for value in inputs.values())
            if self._inputs_bytes + size > _REUSED_BYTES:
                return inputs
            self._inputs[key] = inputs
            self._inputs_bytes += size
        return dict(self._inputs[key])

    def _asked(self, batch: list[int]) -> dict[str, Any]:
        asked = [self.questions[number] for number in batch]
        if asked[0].is_film:
            return self.subject.film_inputs(asked[0].video, asked[0].question)
        return self.subject.inputs([one.images for one in asked], [one.question for one in asked])

    def _add(self, candidate: Candidate | None, chunk: tuple[int, ...], scores: list[float], cost: dict) -> None:
        self._scores.setdefault(candidate, {}).update(zip(chunk, scores, strict=True))
        self._costs.setdefault(candidate, {})[chunk] = cost

    def _resume(self, path: Path, about: dict[str, Any]) -> None:
        settings = {
            "model": fingerprint(self.subject.model),
            "suffix": self.subject.suffix,
            "max_new_tokens": self.subject.max_new_tokens,
            "batch_size": self.batch_size,
            "metric": self.metric.name,
        }
        first = json.loads(json.dumps({"about": about | settings}))
        records = read_lines(path)
        if records and records[0][0] != first:
            raise RunError(f"{path} belongs to another run: same model, questions and options are needed to go on")
        for line, _ in records[1:]:
            candidate = None if line["setting"] is None else Candidate.of(line["setting"])
            self._add(candidate, tuple(line["questions"]), line["scores"], line["cost"])
        self._journal = Lines(path, records[-1][1] if records else 0)
        if not records:
            self._journal.write(first)


def tunable_metric(name: str) -> Metric:
    """Return a metric; raises OptionError for CIDEr, and what `metric_named` raises."""
    if name == "cider":
        raise OptionError(
            "cider cannot be tuned for: a score goes up to 10 and depends on all answers at once, and the test needs "
            "scores in [0, 1] of one answer each; take anls or f1"
        )
    return metric_named(name)


def _seen(question: Any) -> Any:
    if hasattr(question, "path"):
        return str(question.path)
    return tuple((one.name, one.size) for one in (*question.pictures, *filter(None, [question.film])))


__all__ = ["Panel", "tunable_metric"]
