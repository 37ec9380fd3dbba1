# SPDX-License-Identifier: Apache-2.0
"""Ask questions through a back end in batches, shared by the processes of a group. No question is asked twice."""

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
    """Answers of a back end to indexed questions, under many settings.

    Args:
        backend: The back end.
        questions: All questions.
        batch_size: Largest number of questions per batch.
        folder: Run folder that stores answers and may already contain some.
        group: Processes that share the batches. Each has all answers in the end.
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

    def batches(self, setting: Setting | None, indices: Sequence[int]) -> list[list[int]]:
        """Split question indices into batches as they are asked under a setting."""
        return split_batches(indices, 1 if self.backend.is_one_by_one(setting) else self.batch_size, self._is_alone)

    def is_cached(self, key: dict[str, Any], setting: Setting | None, indices: Sequence[int]) -> bool:
        """Return True if all of these questions have answers."""
        done = self._done(key)
        return all(batch[0] in done for batch in self.batches(setting, indices))

    def ask(
        self,
        key: dict[str, Any],
        setting: Setting | None,
        indices: Sequence[int],
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> dict[int, Batch]:
        """Answer questions in batches.

        Args:
            key: Plain values that identify the setting in the folder.
            setting: As in `BenchBackend.answering`.
            indices: Indices of the questions.
            on_batch: Called with the size of each batch that this process asks.

        Returns:
            The batches, by the index of their first question.

        Raises:
            TokenPruneError: If the setting cannot run. Raised in all processes.
            DataError: If a question cannot be asked.
            RunError: If the run cannot continue.
        """
        done, batches = self._done(key), self.batches(setting, indices)
        todo = [batch for batch in batches if batch[0] not in done]
        mine: dict[int, Batch] = {}
        failure, index = None, -1
        try:
            with self.backend.answering(setting) if todo else nullcontext() as answer:
                for index in range(self.group.rank, len(todo), self.group.size):
                    first, *_ = batch = todo[index]
                    answers, cost = mine[first] = answer(
                        first, [self.questions[index_of_question] for index_of_question in batch]
                    )
                    if self.folder is not None:
                        self.folder.add_batch(key, batch, answers, cost)
                    on_batch(len(batch))
        except (DataError, RunError):
            raise
        except TokenPruneError as error:
            failure = (index, str(error))
        everything = self.group.gather((mine, failure))
        for answered, _ in everything:
            done |= answered
        if failures := [failure for _, failure in everything if failure is not None]:
            raise TokenPruneError(min(failures)[1])  # the first error of a run with one process
        return {first: done[first] for first, *_ in batches}

    def _done(self, key: dict[str, Any]) -> dict[int, Batch]:
        before = {} if self.folder is None else self.folder.batches(key)
        return self._answered.setdefault(json.dumps(key), dict(before))

    def _is_alone(self, index_of_question: int) -> bool:
        return self.questions[index_of_question].is_video


__all__ = ["QuestionRunner"]
