# SPDX-License-Identifier: Apache-2.0
"""What the guard finds of one call: which of its pictures are left fewer tokens than was measured to be enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenprune.accounting import DecoderShape
from tokenprune.base import Method
from tokenprune.budget import Budget
from tokenprune.guard.settings import KINDS
from tokenprune.integrations.hf.guard_pixels import SegmentLooks
from tokenprune.statistics import Guarded, Stats

if TYPE_CHECKING:
    from tokenprune.integrations.hf.cutting import Step
    from tokenprune.integrations.hf.guarding import GuardPart


def share_of(budget: Budget) -> float | None:
    """Return the share that a budget asks for, None if it is another kind of budget."""
    return budget.keep if isinstance(budget.keep, float) else None


@dataclass(frozen=True)
class Watched:
    """A method of the patch, its budget, and for each kind the share of the tokens that is enough."""

    method: Method
    budget: Budget
    floors: dict[str, float]

    def enough(self, kind: str, layer: int, count: int, shape: DecoderShape) -> int:
        """Return how many of a picture's `count` tokens are left behind `layer` when the method is patched with its
        floor."""
        budget = Budget(keep=float(self.floors[kind]), per=self.budget.per)
        for method, share in self.method.stages(budget, shape.layers):
            if method.cut_layer <= layer:
                number = share.resolve([count], layer=method.cut_layer, shape=shape, text_tokens=0)[0]
                count = min(count, max(1, method.budget(count, number)))
        return count


@dataclass
class Verdict:
    """The guard's view of one call; the engine asks it how many tokens a cut is to leave (`at_least`).

    rows, counts: row and number of visual tokens of each segment, as they came. prompts: the kinds of question of each
    row, None if they were not read. seen: for each segment the kinds that ask for more tokens, in "auto" mode; else
    empty. low: (segment, kind) -> the method that leaves fewer than enough, and the share that it leaves.
    """

    guard: GuardPart
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

    def at_least(self, step: Step, places: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """Return how many tokens of the segments at `places` a cut is to leave: at least what its budget says, which is
        `wanted`."""
        numbers = list(wanted)
        if (watched := self.guard.cuts.get(step.layer)) is None:
            return numbers
        for index, place in enumerate(places):
            for kind in KINDS:
                enough = self._floor(watched, kind, step.layer, self.counts[place])
                if wanted[index] >= enough:
                    continue
                self.low.setdefault(
                    (place, kind), (watched, share_of(watched.budget) or wanted[index] / self.counts[place])
                )
                if self.seen and kind in self.seen[place]:
                    numbers[index] = max(numbers[index], enough)
                    self.raised.add(place)
        return numbers

    def _floor(self, watched: Watched, kind: str, layer: int, count: int) -> int:
        key = (kind, layer, count)
        if key not in self._enough:
            self._enough[key] = watched.enough(kind, layer, count, self.shape)
        return self._enough[key]

    def conclude(self, kept: list[int], stats: Stats) -> None:
        """All cuts of the call are known. kept: tokens that they leave of each segment."""
        self.kept = list(kept)
        for watched in self.guard.elsewhere:
            for place, count in enumerate(self.counts):
                share = share_of(watched.budget) or min(1.0, (watched.budget.keep or count) / count)
                for kind in KINDS:
                    if share < watched.floors[kind]:
                        self.low.setdefault((place, kind), (watched, share))
        self.guard.conclude(self, stats)

    def reasons(self, row: int, value: float | None) -> list[tuple[str, str]]:
        """(source, kind) of all that a segment is exposed to. value: how much its picture looks like text."""
        found = [("prompt", kind) for kind in (self.prompts or {}).get(row, ())]
        if value is not None and value > self.guard.settings.text_limit:
            found.append(("picture", "text"))
        return found

    def kinds(self, row: int, value: float | None) -> set[str]:
        return {kind for _, kind in self.reasons(row, value)}

    def findings(self) -> list[Guarded]:
        """One for each row with visual tokens; waits for what has not arrived."""
        found: dict[int, Guarded] = {}
        for place, (row, value) in enumerate(zip(self.rows, self.looks.read(), strict=True)):
            asked = None if self.prompts is None else self.prompts[row]
            one = found.setdefault(row, Guarded(row=row, prompt=asked))
            one.tokens, one.kept = one.tokens + self.counts[place], one.kept + self.kept[place]
            one.raised = one.raised or place in self.raised
            if value is not None:
                one.picture = max(value, one.picture or 0.0)
            low = {kind for kind in self.kinds(row, value) if (place, kind) in self.low}
            one.risks = tuple(kind for kind in KINDS if kind in low or kind in one.risks)
        return list(found.values())
