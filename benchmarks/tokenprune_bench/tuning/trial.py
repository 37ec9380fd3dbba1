# SPDX-License-Identifier: Apache-2.0
"""Results of single candidates and of a complete search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenprune.settings import Setting
from tokenprune_bench.tuning.objective import TIMED, compute_shares
from tokenprune_bench.tuning.promise import Promise

_TRACE = 0.001
COLLAPSE = 0.2  # largest drop of a kind of question without a warning


@dataclass
class Trial:
    """Result of one candidate.

    Attributes:
        candidate: The setting.
        state: Why the trial was dropped, or "chosen". Empty while it takes part in the search.
        search: Number of answered questions of the search part.
        held_out: Number of answered held-out questions.
        drop: Mean score lost, on the held-out questions if the trial was tested, else on the search questions.
        bound: Upper confidence bound of the drop. None before the test.
        cost: Result of `Evaluator.cost`.
        timing: Result of `Evaluator.time`.
        predicted: Result of `Evaluator.predict`.
        kinds: Drop of each kind of question on the held-out part.
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
        """Return the cost share to minimize, and the share of FLOPs to break ties."""
        spent = compute_shares(self.cost, self.timing, self.predicted)
        return spent[objective], spent["flops"]

    def get_expected_share(self, objective: str) -> float | None:
        """Return the predicted cost share, or None if it is not known."""
        return self.predicted.get(objective)

    def saving(self, objective: str) -> float:
        """Return the saved share of the cost.

        A timed saving below `_TRACE` is raised to `_TRACE`, unless even the fast runs took longer than the unpatched
        model. Otherwise noise would decide whether a setting with a small saving is tried.
        """
        saved = 1 - self.get_price(objective)[0]
        if objective in TIMED and saved < _TRACE and self.timing[TIMED[objective]]["p20"] < 1:
            return _TRACE
        return saved


@dataclass
class Tuning:
    """Result of a search.

    Attributes:
        promise: The promise that was tested.
        trials: All trials.
        choice: The cheapest trial that keeps the promise, or None.
        search: Number of questions of the search part.
        held_out: Number of held-out questions.
        scores: Mean scores on the held-out questions, under "unpatched" and "tuned".
        objective: The requested objective.
        ranked_by: The objective used for ranking; "flops" if the times were not reliable.
        more_questions: Estimated number of further questions that would prove the promise for the safest setting. None
            if a setting was chosen, or if no number would help.
        notes: Notes for the user.
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
        """Trials that were tested, the safest first."""
        return sorted(
            (trial for trial in self.trials if trial.held_out), key=lambda trial: -trial.get_price(self.ranked_by)[0]
        )

    @property
    def collapsed(self) -> list[str]:
        """Kinds of question where the choice loses more than `COLLAPSE`."""
        return [] if self.choice is None else [kind for kind, drop in self.choice.kinds.items() if drop > COLLAPSE]


__all__ = ["COLLAPSE", "Trial", "Tuning"]
