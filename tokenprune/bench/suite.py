# SPDX-License-Identifier: Apache-2.0
"""The benchmark: every method at every keep on the held-out questions, as plain records that JSON can hold.

A run yields a header, one record for the unpatched model, and one for each (method, keep): either a "result", or
"skipped" with the reason. Tables, marks and plots are made from the records alone (results.py), at any time.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import tokenprune
from tokenprune.base import ImageChooser
from tokenprune.bench.backend import Backend, backend_of, patched
from tokenprune.bench.cost import Cost
from tokenprune.bench.group import ALONE, Group
from tokenprune.bench.heldout import load_heldout
from tokenprune.bench.metrics import metric_named
from tokenprune.bench.model import Subject
from tokenprune.bench.plan import BASELINES, DEFAULT_KEEPS, DEFAULT_PICTURES, Plan, batched, seeds_of
from tokenprune.bench.results import SCHEMA, UNPATCHED
from tokenprune.bench.scenes import KINDS
from tokenprune.errors import DataError, OptionError, RunError, TokenPruneError
from tokenprune.registry import method_class

if TYPE_CHECKING:
    from tokenprune.bench.run_folder import Batch, Pass, RunFolder

__all__ = ["BASELINES", "DEFAULT_KEEPS", "DEFAULT_PICTURES", "Bench", "Plan", "Step", "patched", "seeds_of"]
Step = Callable[[str, int, int], None]


class Bench:
    """One run; `records()` does the work, record by record.

    subject: a model, or another backend that answers. questions: what is asked (`data.Question`), default: the held-out
    set that ships. about: what the header tells of them. folder: where the run is kept, and goes on from. group: the
    processes that share it; each answers its part of the batches, and all have the same records in the end, but for the
    times, which only the first process takes.
    """

    def __init__(
        self,
        subject: Subject | Backend,
        plan: Plan,
        step: Step | None = None,
        *,
        questions: Sequence[Any] | None = None,
        metric: str = "exact",
        about: dict[str, Any] | None = None,
        folder: RunFolder | None = None,
        group: Group = ALONE,
    ) -> None:
        self.subject, self.plan, self.metric = subject, plan, metric_named(metric)
        self.backend = backend_of(subject)
        self.about, self.folder, self.group = about or {}, folder, group
        self.examples = load_heldout(limit=plan.pictures or None) if questions is None else list(questions)
        self.kinds = list(KINDS) if questions is None else sorted({example.kind for example in self.examples})
        self.batches = batched(self.examples, plan.batch_size)
        if group.size > len(self.batches):
            raise OptionError(
                f"{group.size} processes, but only {len(self.batches)} batches of up to {plan.batch_size} questions: "
                "take a smaller --batch-size"
            )
        self.backend.begin(self.examples)
        self._step, self._done = step or (lambda label, done, total: None), 0
        self.total = len(self.batches) + sum(
            len(seeds_of(name, plan.seeds)) * len(self._batches(name)) for name in plan.methods
        ) * len(plan.keeps)

    def records(self) -> Iterator[dict[str, Any]]:
        """Run everything; the order is header, unpatched, then the methods with the baselines first.

        What the folder of the run holds already is taken from there.
        """
        header, *known = self.folder.results if self.folder and self.folder.results else [None]
        found = {(record["method"], record["keep"]): record for record in known}
        if header is None:
            header = self._written(self.header())
        yield header
        passes: dict[Pass, dict[int, Batch]] = {}
        whole: Cost | None = None
        for name, keep in ((UNPATCHED, 1.0), *((name, keep) for name in self.plan.methods for keep in self.plan.keeps)):
            record, mine = found.get((name, keep)), {}
            if record is None:
                record, mine = self._measured(name, keep, whole)
                self._written(record)
            elif record["record"] == "result":
                mine = {place: self.folder.batches(place) for place in self._places(name, keep)}
                self._done += sum(map(len, mine.values()))
            if name == UNPATCHED:
                (batches,) = mine.values()
                whole = Cost.total(cost for _, (_, cost) in sorted(batches.items()))
            if record["record"] == "result":
                passes |= mine
            yield record
        if self.folder is not None:
            self.folder.finish(passes, {place: self._scores(batches) for place, batches in passes.items()})

    def header(self) -> dict[str, Any]:
        index = {kind: f"{number}" for number, kind in enumerate(self.kinds)}
        asked = [index[example.kind] for example in self.examples]
        return {
            "record": "header",
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kinds": self.kinds,
            # One entry a question: the index of its kind. `right` and `scores` of every result have the same order.
            "kind_of_question": "".join(asked) if len(self.kinds) <= 10 else asked,
            "metric": self.metric.name,
            **self.about,
            "plan": asdict(self.plan),
            "suffix": self.backend.suffix,
            "max_new_tokens": self.backend.max_new_tokens,
            "environment": self.backend.environment(),
        }

    def _written(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.folder is not None:
            self.folder.add_result(record)
        return record

    def _places(self, name: str, keep: float | int) -> list[Pass]:
        return [(name, keep, one.get("seed")) for one in seeds_of(name, self.plan.seeds)]

    def _measured(
        self, name: str, keep: float | int, whole: Cost | None
    ) -> tuple[dict[str, Any], dict[Pass, dict[int, Batch]]]:
        """Return the record of a method at a keep, and the answers of its passes."""
        if name == UNPATCHED:
            passes = {place: self._pass(place) for place in self._places(name, keep)}
            return self._result(name, keep, passes, None), passes
        try:
            if issubclass(method_class(name), ImageChooser):
                raise OptionError(f"{name} chooses between the pictures of a prompt; these questions have one each")
            passes = {place: self._pass(place) for place in self._places(name, keep)}
            record = self._result(name, keep, passes, whole)
            if self.plan.repeats and self.group.leads:
                first = self._places(name, keep)[0]
                record["timing"] = self.backend.timing(first, self.examples[0], self.plan.repeats)
        except (DataError, RunError):
            raise  # this ends the run: no method is to blame
        except TokenPruneError as error:
            return {"record": "skipped", "method": name, "keep": keep, "reason": str(error).splitlines()[0]}, {}
        return record, passes

    def _result(
        self, name: str, keep: float | int, passes: dict[Pass, dict[int, Batch]], whole: Cost | None
    ) -> dict[str, Any]:
        scores = [self._scores(batches) for batches in passes.values()]
        costs = next(iter(passes.values()))
        cost = Cost.total(cost for _, (_, cost) in sorted(costs.items()))
        kinds = [example.kind for example in self.examples]
        bar = self.metric.right
        right = ["".join(str(int(bar is not None and score >= bar)) for score in one) for one in scores]
        correct = dict.fromkeys(self.kinds, 0)
        for one in right:
            for kind, answer in zip(kinds, one, strict=True):
                correct[kind] += int(answer)
        record = {
            "record": "result",
            "method": name,
            "keep": keep,
            "site": None if name == UNPATCHED else tokenprune.method_info(name).site.name,
            "seeds": [seed for _, _, seed in passes if seed is not None] or None,
            "n": {kind: kinds.count(kind) * len(right) for kind in self.kinds},
            "correct": correct,
            "right": right,
            "questions": len(self.examples),
            "stats": cost.record(whole or cost),
            "environment": self.backend.environment(),
        }
        if self.metric.graded:
            record["scores"] = [[round(score, 6) for score in one] for one in scores]
        return record

    def _scores(self, batches: dict[int, Batch]) -> list[float]:
        predictions = [answer for _, (answers, _) in sorted(batches.items()) for answer in answers]
        return self.metric.score(predictions, [example.answers for example in self.examples])

    def _pass(self, place: Pass) -> dict[int, Batch]:
        """Answer every question once, this process its part, and return all batches by their first question."""
        name, keep, _ = place
        label = name if name == UNPATCHED else f"{name} {keep:g}"
        done = dict(self.folder.batches(place)) if self.folder is not None else {}
        batches, start = self._batches(name), self._done
        firsts = [0, *itertools.accumulate(map(len, batches))]
        todo = [number for number in range(len(batches)) if firsts[number] not in done]
        mine: dict[int, Batch] = {}
        failure, asking = None, -1
        self._done += len(batches) - len(todo)
        try:
            with self.backend.answering(place) if todo else nullcontext() as answer:
                for asking in todo[self.group.rank :: self.group.size]:
                    answers, cost = mine[firsts[asking]] = answer(asking, batches[asking])
                    if self.folder is not None:
                        self.folder.add_batch(place, firsts[asking], answers, cost)
                    self._done += 1
                    self._step(label, self._done, self.total)
        except (DataError, RunError):
            raise
        except TokenPruneError as error:
            failure = (asking, str(error))
        self._done = start + len(batches)
        everything = self.group.gather((mine, failure))
        if failures := [failure for _, failure in everything if failure is not None]:
            raise TokenPruneError(min(failures)[1])  # what one process alone would have met first
        for answered, _ in everything:
            done |= answered
        return done

    def _batches(self, name: str) -> list[list[Any]]:
        return [[example] for example in self.examples] if self.backend.alone(name) else self.batches
