# SPDX-License-Identifier: Apache-2.0
"""Find the segments of a call that keep fewer tokens than their floor."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.forward.plan import Plan, Stage, Step
from tokenprune.integrations.hf.guard.pixels import SegmentLooks
from tokenprune.integrations.hf.guard.settings import KINDS, is_tokens
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.apply import limit_budget
from tokenprune.selection.method import Method, Site
from tokenprune.statistics import GuardFinding


def compute_share(budget: Budget, count: int | None = None) -> float | None:
    """Return the share of an image's `count` tokens that a budget keeps, or None if it is unknown."""
    if isinstance(budget.keep, numbers.Integral):
        return None if count is None else min(1.0, int(budget.keep) / count)
    return budget.keep


@dataclass(frozen=True)
class Watched:
    """A method of the patch that may keep too few tokens.

    Attributes:
        method: The method.
        budget: Its budget.
        floors: Sufficient share of the tokens, or number of tokens, by kind of question.
        stages: Stages of the method with its floor as the budget, by kind of question. See `Method.stages`.
    """

    method: Method
    budget: Budget
    floors: dict[str, float]
    stages: dict[str, list[tuple[Method, Budget]]]

    @classmethod
    def from_method(cls, method: Method, budget: Budget, floors: dict[str, float], num_layers: int) -> Watched:
        """Return the watched method in a decoder of `num_layers`. Raises the errors of `Method.stages`."""
        budgets = {
            kind: Budget(tokens=int(floor), per=budget.per)
            if is_tokens(floor)
            else Budget(keep=float(floor), per=budget.per)
            for kind, floor in floors.items()
        }
        stages = {kind: method.stages(floor_budget, num_layers) for kind, floor_budget in budgets.items()}
        return cls(method, budget, floors, stages)

    def get_floor_share(self, kind: str, count: float) -> float:
        """Return the floor for a kind of question as a share of the `count` tokens of an image."""
        floor = self.floors[kind]
        return min(1.0, floor / count) if is_tokens(floor) else floor

    def get_floors_at_risk(self) -> dict[str, float]:
        """Return the floors above the budget, or all floors if the budget depends on the image."""
        share = compute_share(self.budget) or 0.0
        return {kind: floor for kind, floor in self.floors.items() if share < floor} or self.floors

    def count_enough(self, kind: str, layer: int, count: int, shape: DecoderShape) -> int:
        """Return the number of tokens that remain of `count` after `layer`, with the floor as the budget."""
        original = [count]
        for method, budget in self.stages[kind]:
            if count and method.cut_layer <= layer:
                (num_tokens,) = budget.resolve(
                    [count], layer=method.cut_layer, shape=shape, text_tokens=0, original=original
                )
                count = limit_budget(method, count, num_tokens)
        return count


@dataclass(frozen=True)
class Watch:
    """Everything that the guard of a patch watches.

    Attributes:
        cuts: The watched method of each decoder cut, by layer.
        elsewhere: Watched methods that act before the decoder.
        text_limit: Text share above which an image counts as text.
    """

    cuts: dict[int, Watched]
    elsewhere: list[Watched]
    text_limit: float


@dataclass
class Verdict:
    """Risks of one call.

    Attributes:
        watch: The watched methods.
        shape: Sizes of the decoder.
        rows: Batch row of each segment.
        counts: Number of visual tokens of each segment before pruning.
        prompts: Kinds of questions of each row, or None if prompts are not read.
        looks: Text shares of the segments.
        required_kinds: Kinds that need more tokens, for each segment. Empty unless the mode is "auto".
        kept: Number of tokens of each segment after the last cut.
        low: By (segment, kind): the method that keeps too few tokens, and the share that it keeps.
        raised: Segments that keep more tokens than their budget.
    """

    watch: Watch
    shape: DecoderShape
    rows: list[int]
    counts: list[int]
    prompts: dict[int, tuple[str, ...]] | None
    looks: SegmentLooks
    required_kinds: list[set[str]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    low: dict[tuple[int, str], tuple[Watched, float]] = field(default_factory=dict)
    raised: set[int] = field(default_factory=set)
    _enough: dict[Any, int] = field(default_factory=dict)

    def raise_counts(self, step: Step, arrived: Sequence[int], budgeted: Sequence[int]) -> list[int]:
        """Return the number of tokens that a cut keeps in each segment.

        Args:
            step: The cut.
            arrived: Number of tokens before the cut, the upper limit.
            budgeted: Number of tokens of the budget, the lower limit.
        """
        counts = list(budgeted)
        watched = self.watch.cuts.get(step.layer)
        if watched is not None and self.required_kinds:
            for index, (count, available) in enumerate(zip(self.counts, arrived, strict=True)):
                enough = [self._count_enough(watched, kind, step.layer, count) for kind in self.required_kinds[index]]
                counts[index] = max(counts[index], min(available, max(enough, default=0)))
        return counts

    def _count_enough(self, watched: Watched, kind: str, layer: int, count: int) -> int:
        key = (kind, layer, count)
        if key not in self._enough:
            self._enough[key] = watched.count_enough(kind, layer, count, self.shape)
        return self._enough[key]

    def conclude(self, plan: Plan) -> None:
        """Compare the plan of all cuts with the floors."""
        self.kept = list(plan.kept)
        for stage in plan.stages:
            if (watched := self.watch.cuts.get(stage.step.layer)) is not None:
                self._conclude_stage(watched, stage)
        for watched in self.watch.elsewhere:
            for index, count in enumerate(self.counts):
                share = compute_share(watched.budget, count)
                # A method on pixels shrinks the image: compute the number of tokens of the original image.
                before = count / share if share and watched.method.site is Site.PRE_ENCODER else count
                for kind in KINDS:
                    if share is not None and share < watched.get_floor_share(kind, before):
                        self.low.setdefault((index, kind), (watched, share))

    def _conclude_stage(self, watched: Watched, stage: Stage) -> None:
        for index, (count, budgeted) in enumerate(zip(self.counts, stage.requested, strict=True)):
            for kind in KINDS:
                if budgeted < self._count_enough(watched, kind, stage.step.layer, count):
                    share = compute_share(watched.budget, count) or budgeted / count
                    self.low.setdefault((index, kind), (watched, share))
            if stage.kept[index] > budgeted:
                self.raised.add(index)

    def get_reasons(self, row: int, text_share: float | None) -> list[tuple[str, str]]:
        """Return the risks of a segment as (source, kind) pairs."""
        reasons = [("prompt", kind) for kind in (self.prompts or {}).get(row, ())]
        if text_share is not None and text_share > self.watch.text_limit:
            reasons.append(("image", "text"))
        return reasons

    def get_kinds(self, row: int, text_share: float | None) -> set[str]:
        return {kind for _, kind in self.get_reasons(row, text_share)}

    def findings(self) -> list[GuardFinding]:
        """Return the finding of each row with visual tokens. Waits for the device."""
        findings: dict[int, GuardFinding] = {}
        for index, (row, text_share) in enumerate(zip(self.rows, self.looks.read(), strict=True)):
            prompt = None if self.prompts is None else self.prompts[row]
            finding = findings.setdefault(row, GuardFinding(row=row, prompt=prompt))
            finding.tokens, finding.kept = finding.tokens + self.counts[index], finding.kept + self.kept[index]
            finding.raised = finding.raised or index in self.raised
            if text_share is not None:
                finding.image = max(text_share, finding.image or 0.0)
            low = {kind for kind in self.get_kinds(row, text_share) if (index, kind) in self.low}
            finding.risks = tuple(kind for kind in KINDS if kind in low or kind in finding.risks)
        return list(findings.values())
