# SPDX-License-Identifier: Apache-2.0
"""The benchmark: run every method at every keep on the questions, and yield plain records.

A run yields a header, a record of the unpatched model, and for each (method, keep) a "result" or "skipped" record.
Tables, marks and plots are computed from the records only (results.py).
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
from tokenprune_bench.backend import EVIDENCE, BenchBackend, get_backend
from tokenprune_bench.demo_package import import_demo
from tokenprune_bench.equal_cost import explain_miss, solve_setting
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.group import SINGLE_PROCESS, Group
from tokenprune_bench.metrics import get_metric
from tokenprune_bench.plan import (
    BASELINES,
    DEFAULT_IMAGES,
    DEFAULT_KEEPS,
    BenchPlan,
    Pass,
)
from tokenprune_bench.profiling.cost import build_cost_record as get_record
from tokenprune_bench.profiling.model import Model
from tokenprune_bench.question_runner import QuestionRunner
from tokenprune_bench.results import SCHEMA, UNPATCHED
from tokenprune_bench.two_pass import ESCALATE

if TYPE_CHECKING:
    from tokenprune_bench.answers import Batch
    from tokenprune_bench.run_folder import RunFolder
    from tokenprune_demo.drawn_sets import Control, DrawnSet

__all__ = ["BASELINES", "DEFAULT_IMAGES", "DEFAULT_KEEPS", "Bench", "BenchPlan", "Step"]
Step = Callable[[str, int, int], None]


class Bench:
    """One run of the benchmark; `records()` executes it.

    Args:
        subject: A model or another back end.
        plan: Methods, keeps and seeds.
        step: Progress callback.
        questions: Questions (`data.Question`), or a drawn set with its controls. None selects the shipped held-out set.
        metric: Name of a metric. None selects the metric of the back end.
        about: Description of the questions for the header.
        evidence_only: Run each question once for its evidence recall, without scores.
        folder: Run folder to store results in and to resume from.
        group: Processes that share the batches. All yield the same records, except for times, which the leader
            measures.
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
        group: Group = SINGLE_PROCESS,
    ) -> None:
        self.subject, self.plan, self.backend = subject, plan, get_backend(subject)
        self.metric = get_metric(metric or self.backend.metric)
        self.about, self.folder, self.group = about or {}, folder, group
        self.evidence_only = evidence_only
        self.controls: list[Control] = []
        self.groups: list[str] = []
        self._unpatched_answers: list[str] = []
        self.options: dict[str, dict[str, Any]] = {}
        if questions is None:
            heldout = import_demo("heldout")
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
        self._asking = QuestionRunner(self.backend, self.examples, plan.batch_size, folder, group)
        batches = len(self.batches(None))
        if group.size > batches:
            raise OptionError(
                f"There are {group.size} processes, but only {batches} batches of up to {plan.batch_size} questions. "
                "Use a smaller --batch-size."
            )
        self.backend.begin(self.examples, evidence=True)
        self._step, self._done = step or (lambda label, done, total: None), 0
        self.total = (1 + len(self.controls)) * batches + sum(
            self._number_of_batches(run_pass) for row in plan.rows() for run_pass in plan.passes(*row)
        )

    def records(self) -> Iterator[dict[str, Any]]:
        """Run everything and yield records: header, unpatched model, controls, then methods with the baselines first.

        Stored records of the run folder are not computed again.
        """
        header, *known = self.folder.results if self.folder and self.folder.results else [None]
        stored = {(record["method"], record["keep"]): record for record in known}
        if header is None:
            header = self._write_record(self.header())
        yield header
        passes: dict[Pass, dict[int, Batch]] = {}
        unpatched_cost: Stats | None = None
        controls = {Pass.for_control(control.name).method: control for control in self.controls}
        for name, keep in [(UNPATCHED, 1.0), *((name, 1.0) for name in controls), *self.plan.rows()]:
            record, mine = stored.get((name, keep)), {}
            if record is None:
                asked = (
                    self._run_control(controls[name])
                    if name in controls
                    else self._measured(name, keep, unpatched_cost)
                )
                record, mine = asked
                self._write_record(record)
            elif record["record"] != "skipped":
                mine = {run_pass: self.folder.batches(run_pass.key) for run_pass in self.plan.passes(name, keep)}
                self._done += sum(map(len, mine.values()))
            if name == UNPATCHED:
                (batches,) = mine.values()
                unpatched_cost, self._unpatched_answers = _sum_costs(batches), _list_predictions(batches)
            if record["record"] != "skipped":
                passes |= mine
            yield record
        if self.folder is not None:
            answered = {run_pass: mine for run_pass, mine in passes.items() if mine}
            self.folder.finish([(run_pass.key, mine, self._scores(mine)) for run_pass, mine in answered.items()])

    def header(self) -> dict[str, Any]:
        index = {kind: f"{index}" for index, kind in enumerate(self.kinds)}
        asked = [index[example.kind] for example in self.examples]
        images = [getattr(example, "index", None) for example in self.examples]
        return {
            "record": "header",
            "schema": SCHEMA,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "kinds": self.kinds,
            # The index of the kind of each question. `right` and `scores` of every result have the same order.
            "kind_of_question": "".join(asked) if len(self.kinds) <= 10 else asked,
            **({"group_of_question": self.groups} if self.groups else {}),
            **({"image_of_question": images} if all(index is not None for index in images) else {}),
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

    def _write_record(self, record: dict[str, Any]) -> dict[str, Any]:
        if self.folder is not None:
            self.folder.add_result(record)
        return record

    def batches(self, setting: Setting | None) -> list[list[int]]:
        """Return the question indices, split into batches as they are asked under a setting."""
        return self._asking.batches(setting, range(len(self.examples)))

    def _measured(
        self, name: str, keep: float | int, unpatched_cost: Stats | None
    ) -> tuple[dict[str, Any], dict[Pass, dict[int, Batch]]]:
        """Return the record of a method at a keep, and the answers of its passes."""
        if name == UNPATCHED:
            passes = {run_pass: self._pass(run_pass) for run_pass in self.plan.passes(name, keep)}
            return self._result(name, keep, passes, None), passes
        try:
            choosing = name != ESCALATE and any(
                isinstance(method, ImageChooser) for method in self.plan.settings[name].methods
            )
            if choosing and not any(len(getattr(question, "sources", ())) > 1 for question in self.examples):
                raise OptionError(
                    f"{name} chooses between the images of a prompt, but these questions have one image each."
                )
            passes = {run_pass: self._pass(run_pass) for run_pass in self.plan.passes(name, keep)}
            record = self._result(name, keep, passes, unpatched_cost)
            if self.plan.equal_cost:
                self._check_spent(record, unpatched_cost)
            if self.plan.repeats and self.group.is_leader and name != ESCALATE:
                first = self._setting(next(iter(passes)))
                record["timing"] = self.backend.timing(first, self.examples[0], self.plan.repeats)
        except (DataError, RunError):
            raise  # the run cannot continue, with any method
        except TokenPruneError as error:
            return {"record": "skipped", "method": name, "keep": keep, "reason": str(error).splitlines()[0]}, {}
        return record, passes

    def _result(
        self, name: str, keep: float | int, passes: dict[Pass, dict[int, Batch]], unpatched_cost: Stats | None
    ) -> dict[str, Any]:
        scores = [self._scores(batches) for batches in passes.values()]
        cost = _sum_costs(next(iter(passes.values())))
        kinds = [example.kind for example in self.examples]
        bar = self.metric.right
        right = [
            "".join(str(int(bar is not None and score >= bar)) for score in answers_of_pass)
            for answers_of_pass in scores
        ]
        correct = dict.fromkeys(self.kinds, 0)
        for answers_of_pass in right:
            for kind, answer in zip(kinds, answers_of_pass, strict=True):
                correct[kind] += int(answer)
        record = {
            "record": "result",
            "method": name,
            "keep": keep,
            **self._build_setting_record(next(iter(passes))),
            "site": None
            if name in (UNPATCHED, ESCALATE)
            else "+".join(method.site.name for method in self.plan.settings[name].methods),
            "seeds": [run_pass.seed for run_pass in passes if run_pass.seed is not None] or None,
            "n": {kind: kinds.count(kind) * len(right) for kind in self.kinds},
            "correct": correct,
            "right": right,
            "questions": len(self.examples),
            "stats": get_record(cost, unpatched_cost or cost),
            "environment": self.backend.environment(),
        }
        recalls = [_list_evidence_recalls(batches) for batches in passes.values()]
        if any(recall is not None for recall in recalls[0]):
            record[EVIDENCE] = [
                [recall if recall is None else round(recall, 6) for recall in recalls_of_pass]
                for recalls_of_pass in recalls
            ]
        if name != UNPATCHED and not self.evidence_only:
            same = [
                [a == b for a, b in zip(_list_predictions(batches), self._unpatched_answers, strict=True)]
                for batches in passes.values()
            ]
            record["same"] = ["".join(str(int(value)) for value in answers_of_pass) for answers_of_pass in same]
        if self.metric.graded:
            record["scores"] = [[round(score, 6) for score in scores_of_pass] for scores_of_pass in scores]
        return record

    def _scores(self, batches: dict[int, Batch]) -> list[float]:
        return self.metric.score(_list_predictions(batches), [example.answers for example in self.examples])

    def _run_control(self, control: Control) -> tuple[dict[str, Any], dict[Pass, dict[int, Batch]]]:
        """Return the record of a control, and the unpatched model's answers."""
        control_pass = Pass.for_control(control.name)
        asking = QuestionRunner(self.backend, control.questions, self.plan.batch_size, self.folder, self.group)
        batches = self._pass(control_pass, asking)
        right = "".join(str(int(score >= 1)) for score in self._scores(batches))
        said = {
            "method": control_pass.method,
            "keep": control_pass.keep,
            "control": control.name,
            "chance": control.chance,
        }
        return {"record": "control", **said, "right": [right], "questions": len(self.examples)}, {control_pass: batches}

    def _setting(self, run_pass: Pass) -> Setting | None:
        """Return the setting of a pass with the method's options for this set.

        Raises:
            BudgetError: If no setting of the method has equal cost.
        """
        if run_pass.setting is None:
            return None
        setting = run_pass.setting.with_defaults(self.options)
        return solve_setting(setting, run_pass.keep) if self.plan.equal_cost else setting

    def _build_setting_record(self, run_pass: Pass) -> dict[str, Any]:
        """Return the setting for the record, without its seed, if method and keep do not determine it."""
        is_stored = self.plan.equal_cost or self.plan.max_visual_tokens is not None
        setting = self._setting(run_pass) if is_stored else None
        return {} if setting is None else {"setting": {k: v for k, v in setting.to_json().items() if k != "seed"}}

    def _number_of_batches(self, run_pass: Pass) -> int:
        try:
            return len(self.batches(self._setting(run_pass)))
        except BudgetError:
            return 0  # the method will be skipped

    def _check_spent(self, record: dict[str, Any], unpatched_cost: Stats) -> None:
        """Check that a result spent its target share.

        Raises:
            BudgetError: If it did not.
        """
        images = sum(1 if example.is_video else len(getattr(example, "sources", ())) or 1 for example in self.examples)
        spent = record["stats"]["visual_tokens_average"]
        why = explain_miss(
            self.plan.settings[record["method"]], record["keep"], spent, images, unpatched_cost.visual_tokens_in
        )
        if why:
            raise BudgetError(why)

    def _pass(self, run_pass: Pass, asking: QuestionRunner | None = None) -> dict[int, Batch]:
        """Answer every question once and return the batches by their first question.

        Args:
            run_pass: The pass.
            asking: Runner of the questions. None selects the default runner.
        """
        setting = self._setting(run_pass)
        start, batches = self._done, len(self.batches(setting))
        label = run_pass.method if setting is None else f"{run_pass.method} {run_pass.keep:g}"

        def on_batch(size: int) -> None:
            self._done += 1
            self._step(label, self._done, self.total)

        try:
            return (asking or self._asking).ask(run_pass.key, setting, range(len(self.examples)), on_batch)
        finally:
            self._done = start + batches


def _list_predictions(batches: dict[int, Batch]) -> list[str]:
    return [answer for _, (answers, _) in sorted(batches.items()) for answer in answers]


def _sum_costs(batches: dict[int, Batch]) -> Stats:
    costs = (
        {name: value for name, value in cost.items() if name != EVIDENCE} for _, (_, cost) in sorted(batches.items())
    )
    return sum((Stats(**cost) for cost in costs), Stats())


def _list_evidence_recalls(batches: dict[int, Batch]) -> list[float | None]:
    """Return the evidence recall of each question."""
    costs = (cost.get(EVIDENCE, [None] * len(answers)) for _, (answers, cost) in sorted(batches.items()))
    return [recall for recalls_of_batch in costs for recall in recalls_of_batch]
