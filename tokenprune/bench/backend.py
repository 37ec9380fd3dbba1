# SPDX-License-Identifier: Apache-2.0
"""What answers the questions of a benchmark: here the model in this process, patched by `tokenprune.patch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

import tokenprune
from tokenprune.base import ResizeMethod
from tokenprune.bench.cost import Cost, Prefill
from tokenprune.bench.data import check_questions, misfits
from tokenprune.bench.model import Subject
from tokenprune.bench.results import UNPATCHED
from tokenprune.bench.timing import compare
from tokenprune.errors import UnsupportedSetupError
from tokenprune.fingerprint import fingerprint
from tokenprune.registry import method_class

if TYPE_CHECKING:
    from tokenprune.bench.run_folder import Batch, Pass

Answer = Callable[[int, list[Any]], "Batch"]  # from the number of a batch and its questions


class Backend(Protocol):
    """What a benchmark needs of an engine.

    suffix: what is added to every question. max_new_tokens: the longest answer. In all methods, a pass is a method, a
    keep and a seed; whoever cannot run it raises a TokenPruneError, with which it is skipped, and DataError or RunError
    where the whole run has to end.
    """

    suffix: str
    max_new_tokens: int

    def misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        """Return the places of questions that cannot be asked, each with the reason."""

    def begin(self, questions: Sequence[Any]) -> None:
        """Take up the questions of a run; raises DataError for those that cannot be asked."""

    def alone(self, method: str) -> bool:
        """Whether a method answers question by question, whatever the size of a batch."""

    def answering(self, place: Pass) -> AbstractContextManager[Answer]:
        """Return a context that gives a function which answers batches of this pass, greedily."""

    def timing(self, place: Pass, question: Any, repeats: int) -> dict[str, Any]:
        """Return the times of a pass against those of the unpatched model, as `timing.compare` does."""

    def environment(self) -> dict[str, Any]:
        """Return what a reader needs to know about the run, as plain values; no path of this machine."""

    def fingerprint(self) -> str:
        """Return what tells the model's weights from those of others."""


class HfBackend:
    """The model in this process, in transformers."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._films = False
        self._reused: dict[int, dict[str, Any]] = {}
        self._reused_bytes = 0

    @property
    def suffix(self) -> str:
        return self.subject.suffix

    @property
    def max_new_tokens(self) -> int:
        return self.subject.max_new_tokens

    def misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        return misfits(questions, self.subject.processor)

    def begin(self, questions: Sequence[Any]) -> None:
        self._films = any(question.is_film for question in questions)
        check_questions(questions, self.subject.processor)

    def alone(self, method: str) -> bool:
        """A method that looks at a picture to size it goes picture by picture: in a batch, LLaVA's processor would make
        all of them one size."""
        if method == UNPATCHED:
            return False
        made = tokenprune.method(method)
        return isinstance(made, ResizeMethod) and made.by_content

    @contextmanager
    def answering(self, place: Pass) -> Iterator[Answer]:
        name = place[0]
        with self._patched(place):
            yield lambda number, batch: self._answer(name, self._inputs(name, number, batch))

    def timing(self, place: Pass, question: Any, repeats: int) -> dict[str, Any]:
        return compare(self.subject, lambda: self._patched(place), lambda: self._asked([question]), repeats)

    def environment(self) -> dict[str, Any]:
        return self.subject.environment()

    def fingerprint(self) -> str:
        return fingerprint(self.subject.model)

    def _patched(self, place: Pass) -> AbstractContextManager[Any]:
        name, keep, seed = place
        return patched(self.subject, name, keep, self._films, **({} if seed is None else {"seed": seed}))

    def _answer(self, name: str, inputs: dict[str, Any]) -> Batch:
        cost = Cost()
        with Prefill(self.subject) as prefill:
            answers = self.subject.generate(inputs)
        cost.add(self.subject, inputs, prefill.kv_bytes if name == UNPATCHED else None)
        return answers, asdict(cost)

    def _inputs(self, name: str, number: int, batch: list[Any]) -> dict[str, Any]:
        if name != UNPATCHED and method_class(name).site is tokenprune.Site.PRE_ENCODER:
            return self._asked(batch)
        if number not in self._reused:
            inputs = self._asked(batch)
            # All methods that do not touch pixels take the same inputs; half a gigabyte of them is kept.
            size = sum(value.numel() * value.element_size() for value in inputs.values())
            if self._reused_bytes + size > 2**29:
                return inputs
            self._reused[number] = inputs
            self._reused_bytes += size
        return dict(self._reused[number])

    def _asked(self, batch: list[Any]) -> dict[str, Any]:
        if batch[0].is_film:
            return self.subject.film_inputs(batch[0].video, batch[0].question)
        return self.subject.inputs([example.images for example in batch], [example.question for example in batch])


def backend_of(subject: Subject | Backend) -> Backend:
    """Return a backend as it is, and for a model the one that runs it in this process."""
    return HfBackend(subject) if isinstance(subject, Subject) else subject


def patched(
    subject: Subject, name: str, keep: float | int, films: bool = False, **options: Any
) -> AbstractContextManager[Any]:
    """Return a context in which the subject's model is patched; methods that act on pixels get its processor.

    films: whether the model sees videos.
    """
    if name == UNPATCHED:
        return nullcontext()
    site = method_class(name).site
    if site is tokenprune.Site.ATTENTION and not films:
        raise UnsupportedSetupError(
            f"{name} acts on videos, and here the model sees pictures only: it would leave them as they are"
        )
    if site is tokenprune.Site.PRE_ENCODER:
        options["processor"] = subject.processor
    return tokenprune.patched(subject.model, name, keep=keep, guard="off", **options)
