# SPDX-License-Identifier: Apache-2.0
"""The search: successive halving over settings on one part of the questions, then a test on the part held out.

Sources: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
(arXiv:1502.07943), algorithm 1, for the halving; Angelopoulos et al., "Learn then Test" (arXiv:2110.01052), section 3,
for testing settings in a fixed order, up to the first that fails (`Tuner._tested` says why that is valid).
Differs from the papers: a candidate is judged by two things, cost and drop. Half of the places go to those that may be
expected to save the most, the other half to the safest: luck on few questions must not push out what will be needed.
The order of the tests is from the safest to the cheapest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from tokenprune.errors import TokenPruneError
from tokenprune.settings import Setting
from tokenprune_bench.errors import DataError, RunError
from tokenprune_bench.tuning.betting import compute_upper_bound, estimate_questions_needed, is_below
from tokenprune_bench.tuning.candidates import explain_unfit
from tokenprune_bench.tuning.estimate import CHANCE, Estimate, compute_prior, select_promoted, select_tests
from tokenprune_bench.tuning.evaluator import Evaluator
from tokenprune_bench.tuning.objective import MAX_SPREAD, TIMED, TITLES, WORK, check_objective, compute_spread
from tokenprune_bench.tuning.promise import Promise, format_points
from tokenprune_bench.tuning.question_split import check_question_count, split_questions
from tokenprune_bench.tuning.stacks import StackPart, explain_skip, find_sites, propose_stacks
from tokenprune_bench.tuning.trial import Trial, Tuning

FINALISTS = 4
_FIRST = 32  # questions, at least, before any candidate is dropped
CARRIED = 2 * FINALISTS  # settings that answer all questions of the search, and are timed if nothing else needs times
_MOST = 20  # times as many questions are the most that are advised


class Tuner:
    """One search; `run()` does it.

    evaluator: answers the questions. candidates: all that are tried. seed: of the split of the questions. repeats:
    timed runs of a setting. objective: what is made small, of `objective.OBJECTIVES`. stacks: how many stacks of the
    candidates' methods may be tried, too. step: gets what is being done, how many answers are there, and how many there
    may be. Raises OptionError for an objective that is not known, or for too few questions.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        candidates: Sequence[Setting],
        promise: Promise,
        *,
        seed: int = 0,
        repeats: int = 7,
        objective: str = "ttft",
        stacks: int = 0,
        step: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.evaluator, self.promise, self.repeats = evaluator, promise, repeats
        self.objective = check_objective(objective)
        self._notes: list[str] = []
        self.trials = [self._trial(candidate) for candidate in dict.fromkeys(candidates)]
        # Until times are there, FLOPs stand for them: the tower's too, where they are known.
        tower = any(trial.predicted.get("tower_share") for trial in self.trials)
        self._stand_in = WORK if tower else "flops"
        self._by = self._stand_in if objective in TIMED and promise.target_ttft is None else objective
        self.stacks = stacks if len(find_sites(trial.candidate for trial in self.trials)) > 1 else 0
        self.search, self.held_out = split_questions(evaluator.groups, evaluator.kinds, seed)
        check_question_count(len(evaluator.kinds), promise, len(self.held_out))
        rungs = max(0, math.ceil(math.log2(max(1, len(self.trials) + self.stacks) / FINALISTS)))
        sizes = [max(_FIRST, len(self.search) >> (rungs - rung)) for rung in range(rungs)]
        self.sizes = sorted({size for size in sizes if size < len(self.search)} | {len(self.search)})
        self._step, self._done = step or (lambda label, done, total: None), 0
        alive, asked = (
            sum(not explain_unfit(trial.candidate, evaluator.videos) for trial in self.trials) + self.stacks,
            0,
        )
        self.total = len(self.search) + len(self.held_out) * (1 + min(FINALISTS, alive))
        for size in self.sizes:
            self.total += alive * (size - asked)
            alive, asked = min(alive, max(CARRIED, math.ceil(alive / 2))), size

    def search_only(self) -> list[Trial]:
        """Search, stacks included, and test nothing; return the trials that were left at the end."""
        return self._halved(self._able(self.trials))

    def run(self) -> Tuning:
        alive = self.search_only()
        if self.objective in TIMED:
            finalists = self._finalists(self._timed(self._best(alive, CARRIED, "others promise more")))
        else:
            finalists = self._timed(self._finalists(alive))
        choice, scores = self._tested(finalists)
        searched, held_out = len(self.search), len(self.held_out)
        return Tuning(
            self.promise, self.trials, choice, searched, held_out, scores, self.objective, self._by,
            more_questions=None if choice else self._more(finalists), notes=self._notes,
        )  # fmt: skip

    def estimate(self) -> tuple[int, float | None]:
        """Return how many answers `run` may take, and about how many seconds; None where a run that goes on can't tell.

        By the time of the first ones, of the unpatched model, which `run` does not ask again.
        """
        chunk = self.search[: self.sizes[0]]
        if self.evaluator.is_cached(None, chunk):
            return self.total, None
        start = time.perf_counter()
        self._asked(None, chunk)
        self._done = 0  # `run` counts these answers
        return self.total, (time.perf_counter() - start) / len(chunk) * self.total

    def _trial(self, candidate: Setting) -> Trial:
        return Trial(candidate, predicted=self.evaluator.predict(candidate))

    def _able(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that can act, and that are fast enough if that counts."""
        for trial in trials:
            reason = explain_unfit(trial.candidate, self.evaluator.videos)
            share = trial.get_expected_share(self._by)
            if reason is None and share is not None and share >= 1:
                reason = f"saves nothing: {share:.2f}x {self._by}, by the closed forms"
            target = reason is None and self.promise.target_ttft is not None
            if target and self._time(trial) and not self.promise.is_reached(trial.timing):
                reason = f"too slow: {trial.timing['ttft_ms']['p50']:.0f} ms to the first token"
            if reason is not None:
                trial.state = reason
        return [trial for trial in trials if not trial.state]

    def _time(self, trial: Trial) -> bool:
        """Time a trial once, and return whether that could be done; if not, it is left with the reason."""
        if trial.timing is not None:
            return True
        self._step(f"timing {trial.candidate}", self._done, self.total)
        try:
            batch = self.objective == "throughput"
            trial.timing = self.evaluator.time(trial.candidate, self.search, self.repeats, batch)
        except (DataError, RunError):
            raise
        except TokenPruneError as error:
            trial.state = _skipped(error)
        return not trial.state

    def _halved(self, alive: list[Trial]) -> list[Trial]:
        """Return those that have answered all questions of the search, and are not shown to lose too much."""
        places, asked = len(alive), 0
        for size in self.sizes:
            if not alive:
                return []
            chunk, first, asked = self.search[asked:size], not asked, size
            self._asked(None, chunk)
            if first:
                alive = [trial for trial in self._first(alive, chunk) if not self._hopeless(trial)]
                alive += self._first(self._able(self._proposed(alive)), chunk)
                places = len(alive)
            else:
                alive = [trial for trial in alive if self._results(trial, chunk, self.search[:size])]
            alive = [trial for trial in alive if not self._hopeless(trial)]
            if size == self.sizes[-1]:
                break
            places = max(CARRIED, math.ceil(places / 2))
            alive = self._best(alive, places, f"others promise more after {size} questions")
        return alive

    def _first(self, trials: list[Trial], chunk: Sequence[int]) -> list[Trial]:
        """Have trials answer the first chunk, the cheapest first by the closed forms, but for those that need not be
        asked; return those that did."""
        for trial in sorted(trials, key=lambda trial: trial.get_expected_share(self._by) or 0.0):
            trial.state = explain_skip(trial, self.trials, self._by, FINALISTS) or ""
            if not trial.state:
                self._results(trial, chunk, chunk)
        return [trial for trial in trials if not trial.state]

    def _proposed(self, alive: list[Trial]) -> list[Trial]:
        """Return trials of stacks, made of settings that have answered."""
        if not self.stacks:
            return []
        found = propose_stacks(
            [StackPart.of(trial, self._drops(trial, self.search[: trial.search]), self._by) for trial in alive],
            lambda candidate: self.evaluator.predict(candidate).get(self._by),
            lambda drops, saving: Estimate.of(
                drops, saving, self.promise, len(self.held_out), compute_prior(saving, self.promise.max_drop)
            ),
            self.stacks,
        )
        known = {trial.candidate for trial in self.trials}
        made = [self._trial(candidate) for candidate in found if candidate not in known]
        self.trials += made
        return made

    def _best(self, alive: list[Trial], places: int, reason: str) -> list[Trial]:
        kept = select_promoted([self._estimate_of(trial) for trial in alive], places)
        for index, trial in enumerate(alive):
            if index not in kept:
                trial.state = reason
        return [trial for trial in alive if not trial.state]

    def _asked(self, candidate: Setting | None, chunk: Sequence[int]) -> None:
        label = "unpatched" if candidate is None else str(candidate)

        def on_batch(answers: int) -> None:
            self._done = min(self.total, self._done + answers)
            self._step(label, self._done, self.total)

        self.evaluator.ask(candidate, chunk, on_batch)

    def _results(self, trial: Trial, chunk: Sequence[int], so_far: Sequence[int]) -> bool:
        try:
            self._asked(trial.candidate, chunk)
        except (DataError, RunError):
            raise  # this ends the run: no method is to blame
        except TokenPruneError as error:
            trial.state = _skipped(error)
            return False
        trial.search, trial.drop = len(so_far), float(self._drops(trial, so_far).mean())
        trial.cost = self.evaluator.cost(trial.candidate)
        return True

    def _drops(self, trial: Trial, numbers: Sequence[int]) -> np.ndarray:
        return self.evaluator.scores(None, numbers) - self.evaluator.scores(trial.candidate, numbers)

    def _hopeless(self, trial: Trial) -> bool:
        """Return True if the drop is shown to be above the allowed one (the same test, turned around)."""
        gains = -self._drops(trial, self.search[: trial.search])
        if is_below(gains, -self.promise.max_drop, self.promise.level):
            trial.state = f"loses too much after {trial.search} questions"
            return True
        return False

    def _estimate_of(self, trial: Trial) -> Estimate:
        by = self._stand_in if self._by in TIMED else self._by  # what is risked does not change from run to run

        def saved(one: Trial) -> float:
            return max(0.0, 1 - one.get_price(by)[0])

        same = [one for one in self.trials if one.search and one.candidate.name == trial.candidate.name]
        lost, all_saved = (sum(one.search * of(one) for one in same) for of in (lambda one: one.drop, saved))
        expected = compute_prior(saved(trial), self.promise.max_drop, lost, all_saved)
        drops = self._drops(trial, self.search[: trial.search])
        return Estimate.of(drops, trial.saving(self._by), self.promise, len(self.held_out), expected)

    def _timed(self, trials: list[Trial]) -> list[Trial]:
        """Time settings that may be tested; where times are too unsteady to rank them, FLOPs do, which is noted."""
        trials = [trial for trial in trials if self._time(trial)]
        widest = max(trials, key=lambda trial: compute_spread(trial.timing, self.objective), default=None)
        steady = widest is None or compute_spread(widest.timing, self.objective) <= MAX_SPREAD
        if self.objective in TIMED:
            self._by = self.objective if steady else self._stand_in
        if not steady:
            ratio = widest.timing[TIMED.get(self.objective, "ttft_ratio")]
            low, high = (ratio[name] for name in ("p20", "p80"))
            other = "prefill FLOPs" if self._stand_in == "flops" else TITLES[WORK]
            instead = "" if self.objective not in TIMED else f": settings are ranked by {other} instead"
            self._notes.append(
                f"Times are not reliable here, that of {widest.candidate} came out at {low:.2f} to {high:.2f} of the "
                f"unpatched model's{instead}."
            )
        return trials

    def _finalists(self, alive: list[Trial]) -> list[Trial]:
        """Return those to be tested, the safest first."""
        estimates = [self._estimate_of(trial) for trial in alive]
        chosen = select_tests(estimates, FINALISTS)
        for index, (trial, estimate) in enumerate(zip(alive, estimates, strict=True)):
            if index in chosen:
                continue
            trial.state = "others promise more"
            if estimate.saving <= 0:
                trial.state = f"saves nothing: {1 - estimate.saving:.2f}x {self._by}"
            elif estimate.chance < CHANCE:
                trial.state = "loses too much in the search"
        return [alive[index] for index in chosen]

    def _tested(self, finalists: list[Trial]) -> tuple[Trial | None, dict[str, float]]:
        """Test from the safest to the cheapest, up to the first that fails; the cheapest that passed is the choice.

        Why nothing is corrected for the number of tests (a fixed-sequence test): the order is a function of the answers
        of the search and of times, and is fixed before a held-out answer is looked at. A false promise needs a setting
        that loses too much and passes. Take the first in the order that loses too much: whoever passes wrongly is this
        one or comes after it, so it must have passed itself, which its own test lets happen with a probability of at
        most 1 - confidence. This holds for any order and any choice among those that passed; that the safest comes
        first, by the search, only makes an answer more likely.
        """
        if not finalists:
            return None, {}
        self._asked(None, self.held_out)
        base = self.evaluator.scores(None, self.held_out)
        kinds = np.array([self.evaluator.kinds[number] for number in self.held_out])
        passed: list[Trial] = []
        for place, trial in enumerate(finalists):
            self._asked(trial.candidate, self.held_out)
            drops = self._drops(trial, self.held_out)
            trial.held_out, trial.drop, trial.cost = (
                len(drops),
                float(drops.mean()),
                self.evaluator.cost(trial.candidate),
            )
            trial.bound = compute_upper_bound(drops, self.promise.level)
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
                trial.state = f"keeps the promise, but {worst} loses {format_points(trial.kinds[worst])}"
            else:
                passed.append(trial)
        scores = {"unpatched": float(base.mean())}
        if not passed:
            return None, scores
        choice = min(passed, key=lambda trial: trial.get_price(self._by))
        choice.state = "chosen"
        return choice, scores | {"tuned": scores["unpatched"] - choice.drop}

    def _more(self, finalists: list[Trial]) -> int | None:
        """Return about how many more questions would show that the first finalist keeps the promise, if it goes on to
        lose what it lost in all its answers so far (`betting.estimate_questions_needed`); None if no number would."""
        if not finalists or finalists[0].state != "not shown to keep the promise":
            return None
        seen, held = self._drops(finalists[0], [*self.search, *self.held_out]), len(self.held_out)
        needed = estimate_questions_needed(seen, self.promise.max_drop, self.promise.level, held, _MOST * held)
        if needed is None:
            return None
        more = (needed - held) * (len(self.search) + held) / held  # as large a part of them is held out
        digit = 10 ** max(0, math.floor(math.log10(more)) - 1)
        return math.ceil(more / digit) * digit  # two digits: it is an estimate


def _skipped(error: TokenPruneError) -> str:
    return f"skipped: {str(error).splitlines()[0]}"


__all__ = ["FINALISTS", "Tuner"]
