# SPDX-License-Identifier: Apache-2.0
"""Back ends that answer the questions of a benchmark; here the model in this process, patched by `tokenprune.patch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from tokenprune.errors import UnsupportedSetupError
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.method import Site
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load
from tokenprune_bench.answers import Batch
from tokenprune_bench.data import misfits, refuse, refused_images
from tokenprune_bench.evidence import recalls
from tokenprune_bench.profiling.cost import Prefill, closed_forms, escalated, load_of, spent
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import escalates, methods_in, patched_by
from tokenprune_bench.profiling.timing import NEW_TOKENS, compare, compare_batches
from tokenprune_bench.two_pass import ESCALATE

EVIDENCE = "evidence"  # in the cost of a batch: the evidence recall of each question, or None
_CHOOSING = (Site.IN_ENCODER, Site.PRE_LLM, Site.IN_LLM)  # where a method chooses among tokens
Answer = Callable[[int, list[Any]], Batch]  # from the number of a batch's first question, and its questions


class BenchBackend(Protocol):
    """The engine interface of a benchmark and of the tuner.

    suffix: what is added to every question. max_new_tokens: the longest answer. metric: the one that grades its answers
    unless another is asked for. Whoever cannot run a setting raises a TokenPruneError, with which it is skipped, and
    DataError or RunError where the whole run has to end.
    """

    suffix: str
    max_new_tokens: int
    metric: str

    def misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        """Return the places of questions that cannot be asked, each with the reason."""

    def begin(self, questions: Sequence[Any], evidence: bool = False) -> None:
        """Take up the questions of a run; raises DataError for those that cannot be asked. evidence: whether the cost
        of each batch shall hold their evidence recall, under `EVIDENCE`, as far as it is known."""

    def alone(self, setting: Setting | None) -> bool:
        """Return whether questions are answered one by one under a setting, whatever the size of a batch."""

    def answering(self, setting: Setting | None) -> AbstractContextManager[Answer]:
        """Return a context that gives a function which answers batches under a setting, greedily."""

    def timing(
        self,
        setting: Setting | None,
        question: Any,
        repeats: int,
        new_tokens: int = NEW_TOKENS,
        processor: bool = False,
    ) -> dict[str, Any]:
        """Return times under a setting against those of the unpatched model, as `timing.compare` does."""

    def batch_timing(self, setting: Setting | None, questions: Sequence[Any], repeats: int) -> dict[str, Any]:
        """Return times of answering questions together, processor included, against those of the unpatched model, as
        `timing.compare_batches` does. Raises UnsupportedSetupError where that cannot be measured."""

    def closed_forms(self, questions: Sequence[Any]) -> tuple[CostModel, list[Load]] | None:
        """Return the model's closed forms, and what each question asks of it; None where that is not known ahead."""

    def environment(self) -> dict[str, Any]:
        """Return what a reader needs to know about the run, as plain values; no path of this machine."""

    def fingerprint(self) -> str:
        """Return what tells the model's weights from those of others."""


class HfBackend:
    """The model in this process, in transformers."""

    def __init__(self, subject: Model) -> None:
        self.subject = subject
        self._videos = self._looks = False
        self._reused: dict[tuple[int, int], dict[str, Any]] = {}
        self._reused_bytes = 0

    @property
    def suffix(self) -> str:
        return self.subject.suffix

    @property
    def max_new_tokens(self) -> int:
        return self.subject.max_new_tokens

    @property
    def metric(self) -> str:
        return self.subject.metric

    def misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        found = dict(misfits(questions, self.subject.processor))
        rest = [place for place in range(len(questions)) if place not in found]
        refused = refused_images([questions[place] for place in rest], lambda one: self.subject.inputs([one], ["?"]))
        found |= {rest[place]: reason for place, reason in refused}
        return sorted(found.items())

    def begin(self, questions: Sequence[Any], evidence: bool = False) -> None:
        self._videos = any(question.is_video for question in questions)
        self._looks = evidence and any(getattr(question, "looks", ()) for question in questions)
        refuse(questions, self.misfits(questions))

    def alone(self, setting: Setting | None) -> bool:
        """Return True if a setting answers questions one by one. A method that looks at an image to size it does: in a
        batch, LLaVA's processor would make all images one size. Two passes take one prompt at a time."""
        return escalates(setting) or any(
            isinstance(method, ResizeMethod) and method.depends_on_content for method in methods_in(setting)
        )

    @contextmanager
    def answering(self, setting: Setting | None) -> Iterator[Answer]:
        if escalates(setting):
            if self._videos:
                raise UnsupportedSetupError(f"{ESCALATE} takes images, and these questions are about videos")
            yield lambda number, batch: escalated(self.subject, batch, setting.keep)
            return
        with patched_by(self.subject, setting, self._videos, record=self._looks):
            yield lambda number, batch: self._answer(setting, self._inputs(setting, number, batch), batch)

    def timing(
        self,
        setting: Setting | None,
        question: Any,
        repeats: int,
        new_tokens: int = NEW_TOKENS,
        processor: bool = False,
    ) -> dict[str, Any]:
        def context() -> AbstractContextManager[Any]:
            return patched_by(self.subject, setting, self._videos)

        return compare(self.subject, context, lambda: self._asked([question]), repeats, new_tokens, processor)

    def batch_timing(self, setting: Setting | None, questions: Sequence[Any], repeats: int) -> dict[str, Any]:
        def answer(how: Setting | None) -> None:
            size = 1 if self._videos or self.alone(how) else len(questions)
            with patched_by(self.subject, how, self._videos):
                for first in range(0, len(questions), size):
                    self.subject.generate(self._asked(list(questions[first : first + size])))

        return compare_batches(lambda: answer(None), lambda: answer(setting), repeats, len(questions))

    def closed_forms(self, questions: Sequence[Any]) -> tuple[CostModel, list[Load]] | None:
        loads = [load_of(self.subject, self._asked([question])) for question in questions]
        return closed_forms(self.subject), loads

    def environment(self) -> dict[str, Any]:
        return self.subject.environment()

    def fingerprint(self) -> str:
        return compute_fingerprint(self.subject.model)

    def _answer(self, setting: Setting | None, inputs: dict[str, Any], batch: list[Any]) -> Batch:
        with Prefill(self.subject) as prefill:
            answers = self.subject.generate(inputs)
        cost = spent(self.subject, inputs, prefill.kv_bytes if setting is None else None)
        record = cost.sums()
        if self._looks and any(method.site in _CHOOSING for method in methods_in(setting)):
            record[EVIDENCE] = recalls(self.subject, inputs, batch, cost.cuts)
        return answers, record

    def _inputs(self, setting: Setting | None, number: int, batch: list[Any]) -> dict[str, Any]:
        if any(method.site is Site.PRE_ENCODER for method in methods_in(setting)):
            return self._asked(batch)  # the processor is another one now
        place = number, id(batch[0])  # a control shows something else under the same number
        if place not in self._reused:
            inputs = self._asked(batch)
            # All methods that do not touch pixels take the same inputs; half a gigabyte of them is kept.
            size = sum(value.numel() * value.element_size() for value in inputs.values())
            if self._reused_bytes + size > 2**29:
                return inputs
            self._reused[place] = inputs
            self._reused_bytes += size
        return dict(self._reused[place])

    def _asked(self, batch: list[Any]) -> dict[str, Any]:
        if batch[0].is_video:
            return self.subject.video_inputs(batch[0].video, batch[0].question)
        labels = [getattr(example, "labels", ()) for example in batch]
        images, questions = [example.images for example in batch], [example.question for example in batch]
        return self.subject.inputs(images, questions, labels if any(labels) else ())


def backend_of(subject: Model | BenchBackend) -> BenchBackend:
    """Return a backend as it is, and for a model the one that runs it in this process."""
    return HfBackend(subject) if isinstance(subject, Model) else subject
