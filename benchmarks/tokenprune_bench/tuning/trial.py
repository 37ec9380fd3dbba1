# SPDX-License-Identifier: Apache-2.0
"""Outcomes of single candidates and of a whole search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenprune.settings import Setting
from tokenprune_bench.tuning.objective import TIMED, compute_shares
from tokenprune_bench.tuning.promise import Promise

_TRACE = 0.001
COLLAPSE = 0.2  # a kind of question that loses more is warned of


@dataclass
class Trial:
    """The outcome of a candidate.

    search, held_out: how many questions of each part it answered. drop: the mean score lost on them, of the part that
    decides (held out, if it got there). bound: below which the true drop is, with the promised confidence; None before
    the test. cost: of `bench.cost.record`; timing: of `Evaluator.time`; predicted: of `Evaluator.predict`. kinds: drop
    of each kind of question, held out. state: why it was left, or "chosen".
    """

    candidate: Setting
    state: str = ""
    search: int = 0
    held_out: int = 0
    drop: float | None = None
    bound: float | None = None
    cost: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, float] = field(default_factory=dict)

    def get_price(self, objective: str) -> tuple[float, float]:
        """Return what is to be small, a share of what the unpatched model spends; to part equals, that of FLOPs."""
        spent = compute_shares(self.cost, self.timing, self.predicted)
        return spent[objective], spent["flops"]

    def get_expected_share(self, objective: str) -> float | None:
        """Return the share that it is expected to spend before it is asked; None where the closed forms do not tell."""
        return self.predicted.get(objective)

    def saving(self, objective: str) -> float:
        """Return the share that is saved. A time that does not differ significantly from the unpatched model's counts
        as a trace, not as nothing: trying a setting that saves little must not depend on the luck of its runs."""
        saved = 1 - self.get_price(objective)[0]
        if objective in TIMED and saved < _TRACE and self.timing[TIMED[objective]]["p20"] < 1:
            return _TRACE
        return saved


@dataclass
class Tuning:
    """The outcome of a search.

    choice: the cheapest that keeps the promise; None if nothing was shown to. scores: mean score on the held-out
    questions, of "unpatched" and of "tuned". objective: what was asked to be small, and ranked_by: what was used to
    rank, "flops" where times were not reliable. more: about how many more questions it takes to show that the safest
    keeps the promise; None where there is a choice, or where no number would help. notes: what else to say.
    """

    promise: Promise
    trials: list[Trial]
    choice: Trial | None
    search: int
    held_out: int
    scores: dict[str, float]
    objective: str = "ttft"
    ranked_by: str = "flops"
    more_questions: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def tested(self) -> list[Trial]:
        """Those that were put to the test, the safest first."""
        return sorted((one for one in self.trials if one.held_out), key=lambda one: -one.get_price(self.ranked_by)[0])

    @property
    def collapsed(self) -> list[str]:
        """The kinds of question in which the choice loses more than `COLLAPSE`."""
        return [] if self.choice is None else [kind for kind, drop in self.choice.kinds.items() if drop > COLLAPSE]


__all__ = ["COLLAPSE", "Trial", "Tuning"]
