# SPDX-License-Identifier: Apache-2.0
"""The search: successive halving over settings on one part of the questions, then a test on the part held out.

Sources: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
(arXiv:1502.07943), algorithm 1, for the halving; Angelopoulos et al., "Learn then Test" (arXiv:2110.01052), section 3,
for testing settings in a fixed order, from the most expensive to the cheapest, up to the first that fails: the order
comes from other questions than the test, so that no correction for the number of settings is needed.
Differs from the papers: a candidate is judged by two things, cost and drop. Half of the places go to those that may be
expected to save the most, the other half to the safest: luck on few questions must not push out what will be needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenprune.errors import DataError, OptionError, RunError, TokenPruneError
from tokenprune.tuning.betting import is_below, upper_bound
from tokenprune.tuning.candidates import Candidate
from tokenprune.tuning.outlook import CHANCE, Outlook, halve, sequence
from tokenprune.tuning.panel import Panel
from tokenprune.tuning.promise import Promise, points

FINALISTS = 4
COLLAPSE = 0.2
_FIRST = 32  # questions, at least, before any candidate is dropped
_PART = 3  # every third picture is for the search: what is held out decides how small a drop can be shown


@dataclass
class Trial:
    """What became of a candidate.

    search, held_out: how many questions of each part it answered. drop: the mean score lost on them, of the part that
    decides (held out, if it got there). bound: below which the true drop is, with the promised confidence; None before
    the test. cost: `Cost.record`; timing: of `bench.timing.compare`. kinds: drop of each kind of question, held out.
    state: why it was left, or "chosen".
    """

    candidate: Candidate
    state: str = ""
    search: int = 0
    held_out: int = 0
    drop: float | None = None
    bound: float | None = None
    cost: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] | None = None
    kinds: dict[str, float] = field(default_factory=dict)

    @property
    def price(self) -> tuple[float, float]:
        """What is to be small: measured TTFT, if that counts, or prefill FLOPs, both as a share of the unpatched
        model's; among equals the tokens averaged over layers."""
        ratio = self.timing["ttft_ratio"]["p50"] if self.timing else self.cost["prefill_flops_ratio"]
        return ratio, self.cost.get("visual_tokens_average", 0.0)


@dataclass
class Tuning:
    """What a tuner found. choice: the cheapest that keeps the promise; None if nothing was shown to. scores: mean score
    on the held-out questions, of "unpatched" and of "tuned"."""

    promise: Promise
    trials: list[Trial]
    choice: Trial | None
    search: int
    held_out: int
    scores: dict[str, float]

    @property
    def collapsed(self) -> list[str]:
        """The kinds of question in which the choice loses more than `COLLAPSE`."""
        return [] if self.choice is None else [kind for kind, drop in self.choice.kinds.items() if drop > COLLAPSE]


def split(groups: Sequence[Any], kinds: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the questions to search with, about a third, and of those to hold out, in random order.

    Questions about the same pictures (equal groups) stay together; pictures are divided evenly by the kinds asked.
    """
    members: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    rng = np.random.default_rng(seed)
    order = list(members.values())
    order = [order[index] for index in rng.permutation(len(order))]
    order.sort(key=lambda numbers: sorted(kinds[number] for number in numbers))
    parts: tuple[list[int], list[int]] = ([], [])
    for place, numbers in enumerate(order):
        parts[place % _PART != 0].extend(numbers)
    return tuple([part[index] for index in rng.permutation(len(part))] for part in parts)


class Tuner:
    """One search; `run()` does it.

    panel: asks the questions. candidates: what is tried. seed: of the split. repeats: timed runs of each candidate,
    with a target for TTFT. step: is told (label, answers, answers in all if nobody drops out). Raises OptionError if
    the questions are too few for any candidate to pass.
    """

    def __init__(
        self,
        panel: Panel,
        candidates: Sequence[Candidate],
        promise: Promise,
        *,
        seed: int = 0,
        repeats: int = 7,
        step: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.panel, self.promise, self.repeats = panel, promise, repeats
        self.trials = [Trial(candidate) for candidate in dict.fromkeys(candidates)]
        self.search, self.held_out = split(panel.groups, panel.kinds, seed)
        check_enough(len(panel.kinds), promise, len(self.held_out))
        rungs = max(0, math.ceil(math.log2(max(1, len(self.trials)) / FINALISTS)))
        sizes = [max(_FIRST, len(self.search) >> (rungs - rung)) for rung in range(rungs)]
        self.sizes = sorted({size for size in sizes if size < len(self.search)} | {len(self.search)})
        self._step, self._done = step or (lambda label, done, total: None), 0
        alive, asked = len(self.trials), 0
        self.total = len(self.search) + len(self.held_out) * (1 + min(FINALISTS, alive))
        for size in self.sizes:
            self.total += alive * (size - asked)
            alive, asked = max(FINALISTS, math.ceil(alive / 2)), size

    def run(self) -> Tuning:
        finalists = self._halved(self._able())
        choice, scores = self._tested(finalists)
        return Tuning(self.promise, self.trials, choice, len(self.search), len(self.held_out), scores)

    def _able(self) -> list[Trial]:
        """Return the trials that can act, and that are fast enough if that counts."""
        for trial in self.trials:
            reason = trial.candidate.unfit(self.panel.films)
            if reason is None and self.promise.target_ttft is not None:
                reason = self._too_slow(trial)
            if reason is not None:
                trial.state = reason
        return [trial for trial in self.trials if not trial.state]

    def _too_slow(self, trial: Trial) -> str | None:
        self._step(f"timing {trial.candidate}", self._done, self.total)
        try:
            trial.timing = self.panel.time(trial.candidate, self.search[0], self.repeats)
        except (DataError, RunError):
            raise
        except TokenPruneError as error:
            return _skipped(error)
        if self.promise.reached(trial.timing):
            return None
        return f"too slow: {trial.timing['ttft_ms']['p50']:.0f} ms to the first token"

    def _halved(self, alive: list[Trial]) -> list[Trial]:
        """Return those that are worth a test, after all questions of the search."""
        places, asked = len(alive), 0
        for size in self.sizes:
            if not alive:
                return []
            chunk, asked = self.search[asked:size], size
            self._asked(None, chunk)
            alive = [trial for trial in alive if self._heard(trial, chunk, self.search[:size])]
            alive = [trial for trial in alive if not self._hopeless(trial)]
            if size == self.sizes[-1]:
                break
            places = max(FINALISTS, math.ceil(places / 2))
            kept = halve([self._outlook(trial) for trial in alive], places)
            for index, trial in enumerate(alive):
                if index not in kept:
                    trial.state = f"others promise more after {size} questions"
            alive = [alive[index] for index in kept]
        return self._finalists(alive)

    def _asked(self, candidate: Candidate | None, chunk: Sequence[int]) -> None:
        label = "unpatched" if candidate is None else str(candidate)

        def told(answers: int) -> None:
            self._done = min(self.total, self._done + answers)
            self._step(label, self._done, self.total)

        self.panel.ask(candidate, chunk, told)

    def _heard(self, trial: Trial, chunk: Sequence[int], so_far: Sequence[int]) -> bool:
        try:
            self._asked(trial.candidate, chunk)
        except (DataError, RunError):
            raise  # this ends the run: no method is to blame
        except TokenPruneError as error:
            trial.state = _skipped(error)
            return False
        trial.search, trial.drop = len(so_far), float(self._drops(trial, so_far).mean())
        trial.cost = self.panel.cost(trial.candidate)
        return True

    def _drops(self, trial: Trial, numbers: Sequence[int]) -> np.ndarray:
        return self.panel.scores(None, numbers) - self.panel.scores(trial.candidate, numbers)

    def _hopeless(self, trial: Trial) -> bool:
        """Whether the drop is shown to be above what is allowed (the same test, turned around)."""
        gains = -self._drops(trial, self.search[: trial.search])
        if is_below(gains, -self.promise.max_drop, self.promise.level):
            trial.state = f"loses too much after {trial.search} questions"
            return True
        return False

    def _outlook(self, trial: Trial) -> Outlook:
        return Outlook.of(
            self._drops(trial, self.search[: trial.search]), 1 - trial.price[0], self.promise, len(self.held_out)
        )

    def _finalists(self, alive: list[Trial]) -> list[Trial]:
        """Return those to be tested, the most expensive first."""
        alive = sorted(alive, key=lambda trial: trial.price, reverse=True)
        outlooks = [self._outlook(trial) for trial in alive]
        chosen = sequence(outlooks)
        for index, trial in enumerate(alive):
            if outlooks[index].chance < CHANCE:
                trial.state = "loses too much in the search"
            elif index not in chosen:
                trial.state = "others promise more"
        return [alive[index] for index in chosen]

    def _tested(self, finalists: list[Trial]) -> tuple[Trial | None, dict[str, float]]:
        """Test in the given order up to the first that fails; the last that passed is the choice."""
        if not finalists:
            return None, {}
        self._asked(None, self.held_out)
        base = self.panel.scores(None, self.held_out)
        passed: list[Trial] = []
        for place, trial in enumerate(finalists):
            self._asked(trial.candidate, self.held_out)
            drops = self._drops(trial, self.held_out)
            trial.held_out, trial.drop, trial.cost = len(drops), float(drops.mean()), self.panel.cost(trial.candidate)
            trial.bound = upper_bound(drops, self.promise.level)
            kinds = np.array([self.panel.kinds[number] for number in self.held_out])
            trial.kinds = {kind: float(drops[kinds == kind].mean()) for kind in sorted(set(kinds.tolist()))}
            if not is_below(drops, self.promise.max_drop, self.promise.level):
                trial.state = "not shown to keep the promise"
                for other in finalists[place + 1 :]:
                    other.state = f"not tested: {trial.candidate}, which was safer, failed"
                break
            trial.state = "keeps the promise"
            limit = self.promise.max_kind_drop
            worst = max(trial.kinds, key=trial.kinds.get)
            if limit is not None and trial.kinds[worst] > limit:
                trial.state = f"keeps the promise, but {worst} loses {points(trial.kinds[worst])}"
            else:
                passed.append(trial)
        scores = {"unpatched": float(base.mean())}
        if not passed:
            return None, scores
        choice = min(passed, key=lambda trial: trial.price)
        choice.state = "chosen"
        return choice, scores | {"tuned": scores["unpatched"] - choice.drop}


def check_enough(questions: int, promise: Promise, held_out: int | None = None) -> None:
    """Raise OptionError if so few questions cannot show that any candidate keeps the promise."""
    held_out = questions - math.ceil(questions / _PART) if held_out is None else held_out
    needed = promise.questions_needed
    if held_out < needed:
        raise OptionError(
            f"{questions} questions are too few for a drop below {points(promise.max_drop)} at a confidence of "
            f"{100 * promise.confidence:g} %: {held_out} of them would be held out, and it takes {needed} if not a "
            f"single answer changes. Ask at least {math.ceil(needed * _PART / (_PART - 1))}, better three times as "
            "many, or allow a larger drop"
        )


def _skipped(error: TokenPruneError) -> str:
    return f"skipped: {str(error).splitlines()[0]}"


__all__ = ["COLLAPSE", "Trial", "Tuner", "Tuning", "check_enough", "split"]
