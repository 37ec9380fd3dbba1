# SPDX-License-Identifier: Apache-2.0
"""Plan the number of visual tokens that each cut of a call keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tokenprune.budgets import Budget
from tokenprune.budgets.video import Clip
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.method import Method
from tokenprune.selection.segments import Segments


@dataclass(frozen=True)
class Step:
    """One cut of a patch: a stage of a method, with its budget, at the input of a decoder layer (0: the entry).

    Attributes:
        owner: Index of the method in the patch. Stages of one method share it.
        whole: Budget of the method, or None if it has a single stage.
    """

    method: Method
    budget: Budget
    owner: int = 0
    whole: Budget | None = None

    @cached_property
    def layer(self) -> int:
        return self.method.cut_layer

    @cached_property
    def acts(self) -> bool:
        """True if the stage runs, because it may drop tokens or stores values for a later stage."""
        if not self.budget.is_identity():
            return True
        return self.method.chooses_count and not (self.whole or self.budget).is_identity()


# (step, tokens of each segment that arrive, tokens that it would keep) -> tokens that it keeps.
Floor = Callable[[Step, Sequence[int], Sequence[int]], list[int]]


@dataclass(frozen=True)
class Stage:
    """Plan of one step. Lists have an entry for each segment.

    Attributes:
        arrived: Tokens that reach the step.
        wanted: Tokens that its budget asks for.
        kept: Tokens that it keeps.
    """

    step: Step
    arrived: list[int]
    wanted: list[int]
    kept: list[int]


@dataclass(frozen=True)
class Plan:
    """The cuts of a call, and the number of tokens that each cut keeps.

    Lists have an entry for each segment of the prompt, which is 0 after all of its tokens are dropped. A method may
    keep another number of tokens than planned. `stage` then plans the later steps again.

    Attributes:
        rows, ordinals, clips: See `Segments`.
        text: Number of text tokens of each row.
        arrived: Tokens that reach the first step.
        floors: Functions that raise the number of tokens that steps keep.
        stages: The planned steps.
    """

    shape: DecoderShape
    rows: list[int]
    ordinals: list[int]
    text: list[int]
    arrived: list[int]
    clips: list[Clip | None]
    floors: tuple[Floor, ...] = ()
    stages: tuple[Stage, ...] = ()

    @cached_property
    def cuts(self) -> frozenset[int]:
        """The layers at whose input a method selects tokens."""
        asked = (one for one in self.stages if one.kept != one.arrived or one.step.method.chooses_count)
        return frozenset(stage.step.layer for stage in asked)

    @property
    def kept(self) -> list[int]:
        """The number of tokens of each segment after the last stage."""
        return self.stages[-1].kept if self.stages else self.arrived

    def counts_of(self, segments: Segments) -> list[int]:
        """Return the number of tokens of each segment of the prompt. segments: the segments after earlier cuts."""
        left = dict(zip(zip(segments.row, segments.ordinal, strict=True), segments.counts, strict=True))
        return [left.get(key, 0) for key in zip(self.rows, self.ordinals, strict=True)]

    def _original(self, step: Step, arrived: list[int]) -> list[int]:
        """Return the tokens that reach the first stage of the method of `step`: `arrived` if `step` is that stage."""
        for stage in self.stages:
            if stage.step.owner == step.owner:
                return stage.arrived
        return arrived

    def stage(self, step: Step, arrived: list[int]) -> Stage:
        """Plan `step` for `arrived` tokens of each segment.

        Each row is planned separately, so that a batch gives the same result as its rows.
        """
        for stage in self.stages:
            if stage.step is step and stage.arrived == arrived:
                return stage  # as planned
        original = self._original(step, arrived)
        wanted = [0] * len(arrived)
        left = [index for index, count in enumerate(arrived) if count]
        for row in dict.fromkeys(self.rows[index] for index in left):
            there = [index for index in left if self.rows[index] == row]
            counts = [arrived[index] for index in there]
            if step.budget.video is not None:
                shares = step.budget.resolve_videos(counts, [self.clips[index] for index in there])
            else:
                shares = step.budget.resolve(
                    counts,
                    layer=step.layer,
                    shape=self.shape,
                    text_tokens=self.text[row],
                    original=[original[index] for index in there],
                )
            for index, number in zip(there, shares, strict=True):
                wanted[index] = allowed(step.method, arrived[index], number)
        kept = wanted
        for floor in self.floors:
            kept = floor(step, arrived, kept)
        return Stage(step, arrived, wanted, kept)

    def of(self, steps: Iterable[Step]) -> Plan:
        """Return the plan with `steps` after its own."""
        plan = self
        for step in steps:
            plan = replace(plan, stages=(*plan.stages, plan.stage(step, plan.kept)))
        return plan

    def raised(self, floor: Floor) -> Plan:
        """Return the plan of the same steps with one more floor, the last that is asked."""
        return replace(self, floors=(*self.floors, floor), stages=()).of(stage.step for stage in self.stages)


def allowed(method: Method, count: int, asked: int) -> int:
    """Return how many of a segment's `count` tokens `method` keeps where its budget asks for `asked`."""
    return min(count, max(method.min_tokens, method.resolve_count(count, asked)))


def plan_cuts(
    steps: Iterable[Step], shape: DecoderShape, segments: Segments, arrived: list[int], tokens: list[int]
) -> Plan:
    """Return what `steps`, in order, do in a call with `segments`.

    arrived: how many tokens of each segment reach the first of them. tokens: of each row, padding left out.
    """
    text = list(tokens)
    for row, count in zip(segments.row, segments.counts, strict=True):
        text[row] -= count
    plan = Plan(shape, segments.row, segments.ordinal, text, arrived, segments.clips)
    return plan.of(step for step in steps if step.acts)
