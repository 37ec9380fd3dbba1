# SPDX-License-Identifier: Apache-2.0
"""The benchmark: every method at every keep on the held-out questions, as plain records that JSON can hold.

A run yields a header, one record for the unpatched model, and one for each (method, keep): either a "result", or
"skipped" with the reason. Tables, marks and plots are made from the records alone (results.py), at any time.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokenprune.errors import BudgetError, OptionError, TokenPruneError
from tokenprune.selection.sites.pixels import ImageChooser
from tokenprune.settings import Setting
from tokenprune.statistics import Stats
from tokenprune_bench.asking import Asking
from tokenprune_bench.backend import EVIDENCE, BenchBackend, backend_of
from tokenprune_bench.equal_cost import missed, setting_for
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.group import ALONE, Group
from tokenprune_bench.metrics import metric_named
from tokenprune_bench.own_questions import demo
from tokenprune_bench.plan import (
    BASELINES,
    DEFAULT_IMAGES,
    DEFAULT_KEEPS,
    BenchPlan,
    Pass,
)
from tokenprune_bench.profiling.cost import record as get_record
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.results import SCHEMA, UNPATCHED
from tokenprune_bench.two_pass import ESCALATE

if TYPE_CHECKING:
    from tokenprune_bench.answers import Batch
    from tokenprune_bench.run_folder import RunFolder
    from tokenprune_demo.drawn_sets import Control, DrawnSet

__all__ = ["BASELINES", "DEFAULT_IMAGES", "DEFAULT_KEEPS", "Bench", "BenchPlan", "Step"]
Step = Callable[[str, int, int], None]


class Bench:
    """One run; `records()` does the work, record by record.

    subject: a model, or another backend that answers. questions: what is asked (`data.Question`), or a set that is
    drawn, with its controls; default: the held-out set that ships with the model. metric: a name of `bench.metrics`;
    default: the back end's. about: what the header tells of them.
    evidence_only: nothing is asked for its answer; each question is run once, for what is kept of its evidence. folder:
    where the run is kept, and goes on from. group: the processes that share it; each answers its part of the batches,
    and all have the same records in the end, but for the times, which only the first process takes.
    """

    def __init__(
        self,
        subject: Model | BenchBackend,
        plan: BenchPlan,
        step: Step | None = None,
        *,
        questions: Sequence[Any] | DrawnSet | None = None,
        metric: str | None = None,
        about: dict[str, Any] | None = None,
        evidence_only: bool = False,
        folder: RunFolder | None = None,
        group: Group = ALONE,
    ) -> None:
        self.subject, self.plan, self.backend = subject, plan, backend_of(subject)
        self.metric = metric_named(metric or self.backend.metric)
        self.about, self.folder, self.group = about or {}, folder, group
        self.evidence_only = evidence_only
        self.controls: list[Control] = []
        self.groups: list[str] = []
        self._said: list[str] = []  # the unpatched model's answers
        self.options: dict[str, dict[str, Any]] = {}
        if questions is None:
            heldout = demo("heldout")
            shipped = getattr(subject, "heldout", None) or heldout.FOLDER
            self.examples = heldout.load_sample(plan.images, folder=shipped)[: plan.limit or None]
            self.kinds = list(dict.fromkeys(example.kind for example in self.examples))
        elif isinstance(questions, Sequence):
            self.examples = list(questions)
            self.kinds = sorted({example.kind for example in self.examples})
        else:
            self.examples, self.kinds = questions.questions, list(questions.kinds)
            self.groups, self.options = questions.groups, questions.options
            self.controls = [] if evidence_only else questions.controls
        self._asking = Asking(self.backend, self.examples, plan.batch_size, folder, group)
        batches = len(self.batches(None))
        if group.size > batches:
            raise OptionError(
                f"{group.size} processes, but only {batches} batches of up to {plan.batch_size} questions: "
                "take a smaller --batch-size"
            )
        self.backend.begin(self.examples, evidence=True)
        self._step, self._done = step or (lambda label, done, total: None), 0
        self.total = (1 + len(self.controls)) * batches + sum(
            self._number_of_batches(one) for row in plan.rows() for one in plan.passes(*row)
        )

    def records(self) -> Iterator[dict[str, Any]]:
        """Run everything; the order is header, unpatched, controls, then the methods with the baselines first.

        What the folder of the run holds already is taken from there.
        """
        header, *known = self.folder.results if self.folder and self.folder.results else [None]
        found = {(record["method"], record["keep"]): record for record in known}
        if header is None:
            header = self._written(self.header())
        yield header
        passes: dict[Pass, dict[int, Batch]] = {}
        whole: Stats | None = None
        controls = {Pass.of_control(one.name).method: one for one in self.controls}
        for name, keep in [(UNPATCHED, 1.0), *((name, 1.0) for name in controls), *self.plan.rows()]:
            record, mine = found.get((name, keep)), {}
            if record is None:
                asked = self._controlled(controls[name]) if name in controls else self._measured(name, keep, whole)
                record, mine = asked
                self._written(record)
            elif record["record"] != "skipped":
                mine = {one: self.folder.batches(one.place) for one in self.plan.passes(name, keep)}
                self._done += sum(map(len, mine.values()))
            if name == UNPATCHED:
                (batches,) = mine.values()
                whole, self._said = _cost(batches), _predictions(batches)
            if record["record"] != "skipped":
                passes |= mine
            yield record
        if self.folder is not None:
            there = {one: mine for one, mine in passes.items() if mine}
            self.folder.finish([(one.place, mine, self._scores(mine)) for one, mine in there.items()])

    def header(self) -> dict[str, Any]:
        index = {kind: f"{number}" for number, kind in enumerate(self.kinds)}
        asked = [index[example.kind] for example in self.examples]
        images = [getattr(example, "number", None) for example in self.examples]
        return {
            "record": "header",
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kinds": self.kinds,
            # One entry a question: the index of its kind. `right` and `scores` of every result have the same order.
            "kind_of_question": "".join(asked) if len(self.kinds) <= 10 else asked,
            **({"group_of_question": self.groups} if self.groups else {}),
            **({"image_of_question": images} if all(one is not None for one in images) else {}),
            **({"evidence_only": True} if self.evidence_only else {}),
            **({"options": self.options} if self.options else {}),
            "metric": self.metric.name,
            **self.about,
            "plan": asdict(self.plan),
            "rows": 1 + len(self.plan.rows()),
            "suffix": self.backend.suffix,
            "max_new_tokens": self.backend.max_new_tokens,
            "environment": self.backend.environment(),
        }

    def _written(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.folder is not None:
            self.folder.add_result(record)
        return record

    def batches(self, setting: Setting | None) -> list[list[int]]:
        """Return the numbers of the questions, cut into the batches in which they are asked under a setting."""
        return self._asking.batches(setting, range(len(self.examples)))

    def _measured(
        self, name: str, keep: float | int, whole: Stats | None
    ) -> tuple[dict[str, Any], dict[Pass, dict[int, Batch]]]:
        """Return the record of a method at a keep, and the answers of its passes."""
        if name == UNPATCHED:
            passes = {one: self._pass(one) for one in self.plan.passes(name, keep)}
            return self._result(name, keep, passes, None), passes
        try:
            choosing = name != ESCALATE and any(
                isinstance(one, ImageChooser) for one in self.plan.settings[name].methods
            )
            if choosing and not any(len(getattr(one, "sources", ())) > 1 for one in self.examples):
                raise OptionError(f"{name} chooses between the images of a prompt; these questions have one each")
            passes = {one: self._pass(one) for one in self.plan.passes(name, keep)}
            record = self._result(name, keep, passes, whole)
            if self.plan.equal_cost:
                self._check_spent(record, whole)
            if self.plan.repeats and self.group.leads and name != ESCALATE:
                first = self._setting(next(iter(passes)))
                record["timing"] = self.backend.timing(first, self.examples[0], self.plan.repeats)
        except (DataError, RunError):
            raise  # this ends the run: no method is to blame
        except TokenPruneError as error:
            return {"record": "skipped", "method": name, "keep": keep, "reason": str(error).splitlines()[0]}, {}
        return record, passes

    def _result(
        self, name: str, keep: float | int, passes: dict[Pass, dict[int, Batch]], whole: Stats | None
    ) -> dict[str, Any]:
        scores = [self._scores(batches) for batches in passes.values()]
        cost = _cost(next(iter(passes.values())))
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
            **self._chosen(next(iter(passes))),
            "site": None
            if name in (UNPATCHED, ESCALATE)
            else "+".join(one.site.name for one in self.plan.settings[name].methods),
            "seeds": [one.seed for one in passes if one.seed is not None] or None,
            "n": {kind: kinds.count(kind) * len(right) for kind in self.kinds},
            "correct": correct,
            "right": right,
            "questions": len(self.examples),
            "stats": get_record(cost, whole or cost),
            "environment": self.backend.environment(),
        }
        seen = [_evidence(batches) for batches in passes.values()]
        if any(one is not None for one in seen[0]):
            record[EVIDENCE] = [[one if one is None else round(one, 6) for one in some] for some in seen]
        if name != UNPATCHED and not self.evidence_only:
            same = [[a == b for a, b in zip(_predictions(one), self._said, strict=True)] for one in passes.values()]
            record["same"] = ["".join(str(int(value)) for value in one) for one in same]
        if self.metric.graded:
            record["scores"] = [[round(score, 6) for score in one] for one in scores]
        return record

    def _scores(self, batches: dict[int, Batch]) -> list[float]:
        return self.metric.score(_predictions(batches), [example.answers for example in self.examples])

    def _controlled(self, control: Control) -> tuple[dict[str, Any], dict[Pass, dict[int, Batch]]]:
        """Return the record of a control, and the unpatched model's answers to what it shows."""
        place = Pass.of_control(control.name)
        asking = Asking(self.backend, control.questions, self.plan.batch_size, self.folder, self.group)
        batches = self._pass(place, asking)
        right = "".join(str(int(score >= 1)) for score in self._scores(batches))
        said = {"method": place.method, "keep": place.keep, "control": control.name, "chance": control.chance}
        return {"record": "control", **said, "right": [right], "questions": len(self.examples)}, {place: batches}

    def _setting(self, one: Pass) -> Setting | None:
        """Return the setting of a pass, with the options that a method has on this set; raises BudgetError for a method
        of which none is known to spend what all shall."""
        if one.setting is None:
            return None
        setting = one.setting.with_defaults(self.options)
        return setting_for(setting, one.keep) if self.plan.equal_cost else setting

    def _chosen(self, one: Pass) -> dict[str, Any]:
        """Return the setting that a record stores, where each method has one of its own; seeds stand beside it."""
        setting = self._setting(one) if self.plan.equal_cost else None
        return {} if setting is None else {"setting": {k: v for k, v in setting.to_json().items() if k != "seed"}}

    def _number_of_batches(self, one: Pass) -> int:
        try:
            return len(self.batches(self._setting(one)))
        except BudgetError:
            return 0  # it will be skipped

    def _check_spent(self, record: dict[str, Any], whole: Stats) -> None:
        """Raise BudgetError if a result did not spend what it shall."""
        images = sum(1 if one.is_video else len(getattr(one, "sources", ())) or 1 for one in self.examples)
        spent = record["stats"]["visual_tokens_average"]
        why = missed(self.plan.settings[record["method"]], record["keep"], spent, images, whole.visual_tokens_in)
        if why:
            raise BudgetError(why)

    def _pass(self, one: Pass, asking: Asking | None = None) -> dict[int, Batch]:
        """Answer every question once, and return all batches by their first question. asking: default: of the
        questions as they are."""
        setting = self._setting(one)
        start, batches = self._done, len(self.batches(setting))
        label = one.method if setting is None else f"{one.method} {one.keep:g}"

        def on_batch(size: int) -> None:
            self._done += 1
            self._step(label, self._done, self.total)

        try:
            return (asking or self._asking).ask(one.place, setting, range(len(self.examples)), on_batch)
        finally:
            self._done = start + batches


def _predictions(batches: dict[int, Batch]) -> list[str]:
    return [answer for _, (answers, _) in sorted(batches.items()) for answer in answers]


def _cost(batches: dict[int, Batch]) -> Stats:
    costs = (
        {name: value for name, value in cost.items() if name != EVIDENCE} for _, (_, cost) in sorted(batches.items())
    )
    return sum((Stats(**cost) for cost in costs), Stats())


def _evidence(batches: dict[int, Batch]) -> list[float | None]:
    """Return the evidence recall of each question."""
    costs = (cost.get(EVIDENCE, [None] * len(answers)) for _, (answers, cost) in sorted(batches.items()))
    return [one for some in costs for one in some]
