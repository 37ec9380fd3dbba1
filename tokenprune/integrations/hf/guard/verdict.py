# SPDX-License-Identifier: Apache-2.0
"""The guard's verdict on one call: the images that are left fewer tokens than was measured to be enough."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.integrations.hf.forward.plan import Plan, Stage, Step, limit_budget
from tokenprune.integrations.hf.guard.pixels import SegmentLooks
from tokenprune.integrations.hf.guard.settings import KINDS, is_tokens
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Method, Site
from tokenprune.statistics import GuardFinding


def share_of(budget: Budget, count: int | None = None) -> float | None:
    """Return the share of an image's `count` tokens that a budget asks for; None if that is not known."""
    if isinstance(budget.keep, numbers.Integral):
        return None if count is None else min(1.0, int(budget.keep) / count)
    return budget.keep


@dataclass(frozen=True)
class Watched:
    """A method of the patch, its budget, and for each kind what is enough, a share of the tokens or an int of them;
    stages: what the method consists of when patched with that (`Method.stages`)."""

    method: Method
    budget: Budget
    floors: dict[str, float]
    stages: dict[str, list[tuple[Method, Budget]]]

    @classmethod
    def of(cls, method: Method, budget: Budget, floors: dict[str, float], layers: int) -> Watched:
        """layers: of the decoder. Raises what `Method.stages` raises."""
        budgets = {
            kind: Budget(tokens=int(floor), per=budget.per)
            if is_tokens(floor)
            else Budget(keep=float(floor), per=budget.per)
            for kind, floor in floors.items()
        }
        return cls(method, budget, floors, {kind: method.stages(one, layers) for kind, one in budgets.items()})

    def share_of(self, kind: str, count: float) -> float:
        """Return the share of an image's `count` tokens that is enough."""
        floor = self.floors[kind]
        return min(1.0, floor / count) if is_tokens(floor) else floor

    def at_risk(self) -> dict[str, float]:
        """Return the floors of the kinds that may be left too few tokens; all of them where only the image tells."""
        share = share_of(self.budget) or 0.0
        return {kind: floor for kind, floor in self.floors.items() if share < floor} or self.floors

    def enough(self, kind: str, layer: int, count: int, shape: DecoderShape) -> int:
        """Return how many of an image's `count` tokens are left behind `layer` when the method is patched with its
        floor."""
        original = [count]
        for method, share in self.stages[kind]:
            if count and method.cut_layer <= layer:
                (number,) = share.resolve(
                    [count], layer=method.cut_layer, shape=shape, text_tokens=0, original=original
                )
                count = limit_budget(method, count, number)
        return count


@dataclass(frozen=True)
class Watch:
    """All that the guard of a patch watches.

    cuts: the watched method of each cut at the decoder, by layer. elsewhere: methods that act before the decoder.
    text_limit: an image counts as text from this likeness on.
    """

    cuts: dict[int, Watched]
    elsewhere: list[Watched]
    text_limit: float


@dataclass
class Verdict:
    """The guard's view of one call; its floor of a plan says how many tokens a cut is to leave (`at_least`).

    rows, counts: row and number of visual tokens of each segment, as they came. prompts: the kinds of question of each
    row, None if they were not read. seen: for each segment the kinds that ask for more tokens, in "auto" mode; else
    empty. low: (segment, kind) -> the method that leaves fewer than enough, and the share that it leaves.
    """

    watch: Watch
    shape: DecoderShape
    rows: list[int]
    counts: list[int]
    prompts: dict[int, tuple[str, ...]] | None
    looks: SegmentLooks
    seen: list[set[str]] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    low: dict[tuple[int, str], tuple[Watched, float]] = field(default_factory=dict)
    raised: set[int] = field(default_factory=set)
    _enough: dict[Any, int] = field(default_factory=dict)

    def at_least(self, step: Step, arrived: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """Return how many of each segment's tokens a cut is to leave: at least what its budget says, which is `wanted`,
        and at most what `arrived`."""
        leave = list(wanted)
        watched = self.watch.cuts.get(step.layer)
        if watched is not None and self.seen:
            for place, (count, came) in enumerate(zip(self.counts, arrived, strict=True)):
                enough = [self._floor(watched, kind, step.layer, count) for kind in self.seen[place]]
                leave[place] = max(leave[place], min(came, max(enough, default=0)))
        return leave

    def _floor(self, watched: Watched, kind: str, layer: int, count: int) -> int:
        key = (kind, layer, count)
        if key not in self._enough:
            self._enough[key] = watched.enough(kind, layer, count, self.shape)
        return self._enough[key]

    def conclude(self, plan: Plan) -> None:
        """Note what the cuts of a call leave, all of which are planned."""
        self.kept = list(plan.kept)
        for stage in plan.stages:
            if (watched := self.watch.cuts.get(stage.step.layer)) is not None:
                self._conclude(watched, stage)
        for watched in self.watch.elsewhere:
            for place, count in enumerate(self.counts):
                share = share_of(watched.budget, count)
                # Of a smaller image, the tokens that it would have made.
                whole = count / share if share and watched.method.site is Site.PRE_ENCODER else count
                for kind in KINDS:
                    if share is not None and share < watched.share_of(kind, whole):
                        self.low.setdefault((place, kind), (watched, share))

    def _conclude(self, watched: Watched, stage: Stage) -> None:
        for place, (count, wanted) in enumerate(zip(self.counts, stage.requested, strict=True)):
            for kind in KINDS:
                if wanted < self._floor(watched, kind, stage.step.layer, count):
                    share = share_of(watched.budget, count) or wanted / count
                    self.low.setdefault((place, kind), (watched, share))
            if stage.kept[place] > wanted:
                self.raised.add(place)

    def reasons(self, row: int, value: float | None) -> list[tuple[str, str]]:
        """(source, kind) of all that a segment is exposed to. value: how much its image looks like text."""
        found = [("prompt", kind) for kind in (self.prompts or {}).get(row, ())]
        if value is not None and value > self.watch.text_limit:
            found.append(("image", "text"))
        return found

    def kinds(self, row: int, value: float | None) -> set[str]:
        return {kind for _, kind in self.reasons(row, value)}

    def findings(self) -> list[GuardFinding]:
        """One for each row with visual tokens; waits for what has not arrived."""
        found: dict[int, GuardFinding] = {}
        for place, (row, value) in enumerate(zip(self.rows, self.looks.read(), strict=True)):
            asked = None if self.prompts is None else self.prompts[row]
            one = found.setdefault(row, GuardFinding(row=row, prompt=asked))
            one.tokens, one.kept = one.tokens + self.counts[place], one.kept + self.kept[place]
            one.raised = one.raised or place in self.raised
            if value is not None:
                one.image = max(value, one.image or 0.0)
            low = {kind for kind in self.kinds(row, value) if (place, kind) in self.low}
            one.risks = tuple(kind for kind in KINDS if kind in low or kind in one.risks)
        return list(found.values())
