# SPDX-License-Identifier: Apache-2.0
"""Back ends that answer the questions of a benchmark. This one runs a patched model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from PIL import Image

from tokenprune.errors import UnsupportedSetupError
from tokenprune.models.fingerprint import compute_fingerprint
from tokenprune.selection.method import Site
from tokenprune.selection.sites.pixels import ResizeMethod
from tokenprune.settings import Setting
from tokenprune.settings.cost import CostModel, Load
from tokenprune_bench.answers import Batch
from tokenprune_bench.data import find_misfits, find_refused_images, raise_for_misfits
from tokenprune_bench.evidence import compute_batch_recalls
from tokenprune_bench.profiling.cost import (
    CacheMeter,
    answer_with_escalation,
    build_cost_model,
    build_load,
    get_batch_cost,
)
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.profiling.patched import get_methods, is_escalation, patched_by
from tokenprune_bench.profiling.timing import NEW_TOKENS, compare_batches, compare_times
from tokenprune_bench.two_pass import ESCALATE

EVIDENCE = "evidence"  # key in the cost of a batch: evidence recall of each question, or None
_CHOOSING = (Site.IN_ENCODER, Site.PRE_LLM, Site.IN_LLM)  # sites where a method selects tokens
Answer = Callable[[int, list[Any]], Batch]  # takes the index of the first question, and the questions of a batch


class BenchBackend(Protocol):
    """Engine interface of the benchmark and of the tuner.

    Methods raise a TokenPruneError for settings that they cannot run; such settings are skipped. DataError and RunError
    end the run.

    Attributes:
        suffix: Text added to every question.
        max_new_tokens: Maximum length of an answer.
        metric: Default metric.
    """

    suffix: str
    max_new_tokens: int
    metric: str

    def find_misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        """Return (index, reason) of the questions that cannot be asked."""

    def begin(self, questions: Sequence[Any], evidence: bool = False) -> None:
        """Set the questions of a run.

        Args:
            questions: All questions.
            evidence: Whether the cost of each batch has the evidence recall of its questions under `EVIDENCE`, if
                known.

        Raises:
            DataError: If a question cannot be asked.
        """

    def is_one_by_one(self, setting: Setting | None) -> bool:
        """Return True if questions are answered one at a time under a setting."""

    def answering(self, setting: Setting | None) -> AbstractContextManager[Answer]:
        """Open a context with a function that answers batches greedily under a setting."""

    def timing(
        self,
        setting: Setting | None,
        question: Any,
        repeats: int,
        new_tokens: int = NEW_TOKENS,
        processor: bool = False,
    ) -> dict[str, Any]:
        """Return times of a setting relative to the unpatched model, as `timing.compare_times`."""

    def batch_timing(self, setting: Setting | None, questions: Sequence[Any], repeats: int) -> dict[str, Any]:
        """Return times of a batch of questions, including the processor, as `timing.compare_batches`.

        Raises:
            UnsupportedSetupError: If the back end cannot measure batches.
        """

    def build_cost_model(self, questions: Sequence[Any]) -> tuple[CostModel, list[Load]] | None:
        """Return the closed-form cost model and the load of each question, or None if they are not known in advance."""

    def environment(self) -> dict[str, Any]:
        """Describe model, machine and versions as plain values, without local paths."""

    def fingerprint(self) -> str:
        """Return an identifier of the model's weights."""


class HfBackend:
    """Back end for a transformers model in this process."""

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

    def find_misfits(self, questions: Sequence[Any]) -> list[tuple[int, str]]:
        reasons = dict(find_misfits(questions, self.subject.processor))
        rest = [index for index in range(len(questions)) if index not in reasons]
        refused = find_refused_images(
            [questions[index] for index in rest], lambda image: self.subject.inputs([image], ["?"])
        )
        reasons |= {rest[index]: reason for index, reason in refused}
        return sorted(reasons.items())

    def begin(self, questions: Sequence[Any], evidence: bool = False) -> None:
        self._videos = any(question.is_video for question in questions)
        self._looks = evidence and any(getattr(question, "looks", ()) for question in questions)
        raise_for_misfits(questions, self.find_misfits(questions))

    def is_one_by_one(self, setting: Setting | None) -> bool:
        """Return True for methods that size images by content, and for escalation.

        LLaVA's processor would resize all images of a batch to one size. Escalation takes one prompt at a time.
        """
        return is_escalation(setting) or any(
            isinstance(method, ResizeMethod) and method.depends_on_content for method in get_methods(setting)
        )

    @contextmanager
    def answering(self, setting: Setting | None) -> Iterator[Answer]:
        if is_escalation(setting):
            if self._videos:
                raise UnsupportedSetupError(f"{ESCALATE} supports images only, but these questions are about videos.")
            yield lambda first, batch: answer_with_escalation(self.subject, batch, setting.keep)
            return
        with patched_by(self.subject, setting, self._videos, record=self._looks):
            yield lambda first, batch: self._answer(setting, self._get_inputs(setting, first, batch), batch)

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

        return compare_times(self.subject, context, lambda: self._asked([question]), repeats, new_tokens, processor)

    def batch_timing(self, setting: Setting | None, questions: Sequence[Any], repeats: int) -> dict[str, Any]:
        def answer(how: Setting | None) -> None:
            size = 1 if self._videos or self.is_one_by_one(how) else len(questions)
            with patched_by(self.subject, how, self._videos):
                for first in range(0, len(questions), size):
                    self.subject.generate(self._asked(list(questions[first : first + size])))

        return compare_batches(lambda: answer(None), lambda: answer(setting), repeats, len(questions))

    def build_cost_model(self, questions: Sequence[Any]) -> tuple[CostModel, list[Load]] | None:
        loads = [build_load(self.subject, self._asked([question])) for question in questions]
        return build_cost_model(self.subject), loads

    def environment(self) -> dict[str, Any]:
        return self.subject.environment()

    def fingerprint(self) -> str:
        return compute_fingerprint(self.subject.model)

    def _answer(self, setting: Setting | None, inputs: dict[str, Any], batch: list[Any]) -> Batch:
        with CacheMeter(self.subject) as prefill:
            answers = self.subject.generate(inputs)
        cost = get_batch_cost(self.subject, inputs, prefill.kv_bytes if setting is None else None)
        record = cost.sums()
        if self._looks and any(method.site in _CHOOSING for method in get_methods(setting)):
            record[EVIDENCE] = compute_batch_recalls(self.subject, inputs, batch, cost.cuts)
        return answers, record

    def _get_inputs(self, setting: Setting | None, first: int, batch: list[Any]) -> dict[str, Any]:
        if any(method.site is Site.PRE_ENCODER for method in get_methods(setting)):
            return self._asked(batch)  # the method has replaced the processor
        key = first, id(batch[0])  # a control has other inputs under the same index
        if key not in self._reused:
            inputs = self._asked(batch)
            # All methods that do not change pixels share these inputs. The cache is limited to 512 MiB.
            size = sum(value.numel() * value.element_size() for value in inputs.values())
            if self._reused_bytes + size > 2**29:
                return inputs
            self._reused[key] = inputs
            self._reused_bytes += size
        return dict(self._reused[key])

    def _asked(self, batch: list[Any]) -> dict[str, Any]:
        if batch[0].is_video:
            return self.subject.video_inputs(batch[0].video, batch[0].question)
        labels = [getattr(example, "labels", ()) for example in batch]
        images, questions = list(map(self._read_images, batch)), [example.question for example in batch]
        return self.subject.inputs(images, questions, labels if any(labels) else ())

    def _read_images(self, question: Any) -> Sequence[Image.Image]:
        """Return the images of a question. Files of the user are decoded at the scale that the processor needs."""
        load = getattr(question, "load_images", None)
        return question.images if load is None else load(self.subject.processor)


def get_backend(subject: Model | BenchBackend) -> BenchBackend:
    """Return `subject` if it is a back end, or the back end of a model in this process."""
    return HfBackend(subject) if isinstance(subject, Model) else subject
