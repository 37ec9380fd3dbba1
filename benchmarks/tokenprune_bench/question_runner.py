# SPDX-License-Identifier: Apache-2.0
"""Puts questions to a back end, batch by batch: shared by the processes of a group, and nothing is asked twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tokenprune.errors import TokenPruneError
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.group import SINGLE_PROCESS, Group
from tokenprune_bench.plan import split_batches

if TYPE_CHECKING:
    from tokenprune.settings import Setting
    from tokenprune_bench.answers import Batch
    from tokenprune_bench.backend import BenchBackend
    from tokenprune_bench.run_folder import RunFolder


class QuestionRunner:
    """The answers to numbered questions, of a back end under many settings.

    folder: where they are kept, and which may hold some already. group: the processes among which batches are divided;
    each has all answers in the end.
    """

    def __init__(
        self,
        backend: BenchBackend,
        questions: Sequence[Any],
        batch_size: int,
        folder: RunFolder | None = None,
        group: Group = SINGLE_PROCESS,
    ) -> None:
        self.backend, self.questions, self.batch_size = backend, questions, batch_size
        self.folder, self.group = folder, group
        self._answered: dict[str, dict[int, Batch]] = {}

    def batches(self, setting: Setting | None, numbers: Sequence[int]) -> list[list[int]]:
        """Cut numbers of questions into batches, as they are asked under a setting."""
        return split_batches(numbers, 1 if self.backend.is_one_by_one(setting) else self.batch_size, self._is_alone)

    def is_cached(self, place: dict[str, Any], setting: Setting | None, numbers: Sequence[int]) -> bool:
        """Return whether all of these questions have been answered."""
        done = self._done(place)
        return all(batch[0] in done for batch in self.batches(setting, numbers))

    def ask(
        self,
        place: dict[str, Any],
        setting: Setting | None,
        numbers: Sequence[int],
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> dict[int, Batch]:
        """Return the answers to questions in batches, by the number of the first one of each.

        place: plain values that name the setting in the folder. setting: as `BenchBackend.answering` takes it.
        on_batch: called with the size of each batch that this process asked. Raises TokenPruneError for a setting that
        cannot act, in all processes, and DataError or RunError where the run has to end.
        """
        done, batches = self._done(place), self.batches(setting, numbers)
        todo = [batch for batch in batches if batch[0] not in done]
        mine: dict[int, Batch] = {}
        failure, index = None, -1
        try:
            with self.backend.answering(setting) if todo else nullcontext() as answer:
                for index in range(self.group.rank, len(todo), self.group.size):
                    first, *_ = batch = todo[index]
                    answers, cost = mine[first] = answer(first, [self.questions[number] for number in batch])
                    if self.folder is not None:
                        self.folder.add_batch(place, batch, answers, cost)
                    on_batch(len(batch))
        except (DataError, RunError):
            raise
        except TokenPruneError as error:
            failure = (index, str(error))
        everything = self.group.gather((mine, failure))
        for answered, _ in everything:
            done |= answered
        if failures := [failure for _, failure in everything if failure is not None]:
            raise TokenPruneError(min(failures)[1])  # what one process alone would have met first
        return {first: done[first] for first, *_ in batches}

    def _done(self, place: dict[str, Any]) -> dict[int, Batch]:
        before = {} if self.folder is None else self.folder.batches(place)
        return self._answered.setdefault(json.dumps(place), dict(before))

    def _is_alone(self, number: int) -> bool:
        return self.questions[number].is_video


__all__ = ["QuestionRunner"]
