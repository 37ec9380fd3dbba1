# SPDX-License-Identifier: Apache-2.0
"""How many visual tokens each cut of a call keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tokenprune.accounting import DecoderShape
from tokenprune.base import Method, Selection
from tokenprune.budget import Budget
from tokenprune.tokens import Segments


@dataclass(frozen=True)
class Step:
    """One cut of a patch: a method with its budget, at the input of a decoder layer (0: at the decoder's entry)."""

    method: Method
    budget: Budget

    @property
    def layer(self) -> int:
        return self.method.cut_layer


@dataclass(frozen=True)
class Merged:
    """What is left of a call's visual tokens after a merge in the tower, and the step that it is reported as."""

    step: Step
    selection: Selection


# What a cut is to leave of each segment, told the step, how many tokens of each arrive, and how many its budget wants.
AtLeast = Callable[[Step, Sequence[int], Sequence[int]], list[int]]


@dataclass(frozen=True)
class Stage:
    """A step in one call. arrived, wanted, kept: tokens of each segment that reach it, that its budget asks for, and
    that it keeps."""

    step: Step
    arrived: list[int]
    wanted: list[int]
    kept: list[int]


@dataclass(frozen=True)
class Plan:
    """Which cuts a call makes, and how many tokens they keep.

    rows: the batch row of each segment. text: of each row, its tokens that are not visual. arrived: of each segment,
    the tokens that reach the first stage. at_least: may have a cut keep more tokens than its budget says. stages: what
    is known ahead; a method may keep another number than it is asked for, and a later one is then told by `stage`.
    """

    shape: DecoderShape
    rows: list[int]
    text: list[int]
    arrived: list[int]
    at_least: AtLeast
    stages: tuple[Stage, ...] = ()

    @cached_property
    def cuts(self) -> frozenset[int]:
        """The layers at whose input tokens leave."""
        return frozenset(stage.step.layer for stage in self.stages if stage.kept != stage.arrived)

    @property
    def kept(self) -> list[int]:
        """How many tokens of each segment the last stage leaves."""
        return self.stages[-1].kept if self.stages else self.arrived

    def stage(self, step: Step, arrived: list[int]) -> Stage:
        """Return what `step` does when `arrived` tokens of each segment reach it; row by row, so that a batch gives
        what its rows give alone."""
        wanted = list(arrived)
        for row in dict.fromkeys(self.rows):
            places = [place for place, other in enumerate(self.rows) if other == row]
            of_row = [arrived[place] for place in places]
            shares = step.budget.resolve(of_row, layer=step.layer, shape=self.shape, text_tokens=self.text[row])
            for place, count, number in zip(places, of_row, shares, strict=True):
                wanted[place] = min(count, max(1, step.method.budget(count, number)))
        return Stage(step, arrived, wanted, self.at_least(step, arrived, wanted))


def plan_cuts(
    steps: Iterable[Step], shape: DecoderShape, segments: Segments,
    arrived: list[int], tokens: list[int], at_least: AtLeast,
) -> Plan:  # fmt: skip
    """Return what `steps`, in order, do in a call with `segments`.

    arrived: how many tokens of each segment reach the first of them. tokens: of each row, padding left out.
    """
    text = list(tokens)
    for row, count in zip(segments.row, segments.counts, strict=True):
        text[row] -= count
    plan = Plan(shape, segments.row, text, arrived, at_least)
    for step in steps:
        if not step.budget.is_identity():
            plan = replace(plan, stages=(*plan.stages, plan.stage(step, plan.kept)))
    return plan
