# SPDX-License-Identifier: Apache-2.0
"""Search by successive halving on one part of the questions, then a test on the held-out part.

Source:
    Halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization"
    (arXiv 1502.07943), Algorithm 1.
    Tests in a fixed order up to the first failure: Angelopoulos et al., "Learn then Test" (arXiv 2110.01052),
    section 3. `Tuner._tested` explains why this order is valid.

Differences from the paper:
    - Candidates are judged by cost and drop. Half of the remaining slots go to the largest expected savings, the other
      half to the safest candidates, so luck on few questions does not remove them.
    - The tests go from the safest candidate to the cheapest.
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
_FIRST = 32  # minimum number of questions before a candidate is dropped
CARRIED = 2 * FINALISTS  # settings that answer all search questions, and are timed for a timed objective
_MAX_FACTOR = 20  # largest factor of further questions to advise


class Tuner:
    """One search; `run()` executes it.

    Args:
        evaluator: Answers the questions.
        candidates: All settings to try.
        promise: The promise to prove.
        seed: Seed of the split of the questions.
        repeats: Timed runs per setting.
        objective: Cost to minimize, a key of `objective.OBJECTIVES`.
        stacks: Maximum number of stacks of the candidates' methods to try.
        step: Progress callback with a label, the number of answers so far and their maximum.

    Raises:
        OptionError: If the objective is not known, or there are too few questions.
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
        self.trials = [self._build_trial(candidate) for candidate in dict.fromkeys(candidates)]
        # FLOPs replace times until these are measured, including the tower's FLOPs if they are known.
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
        """Run the search, including stacks, without the test. Return the remaining trials."""
        return self._halve_trials(self._select_usable_trials(self.trials))

    def run(self) -> Tuning:
        """Run the search and the test."""
        alive = self.search_only()
        if self.objective in TIMED:
            finalists = self._select_finalists(self._timed(self._best(alive, CARRIED, "others promise more")))
        else:
            finalists = self._timed(self._select_finalists(alive))
        choice, scores = self._tested(finalists)
        searched, held_out = len(self.search), len(self.held_out)
        return Tuning(
            self.promise, self.trials, choice, searched, held_out, scores, self.objective, self._by,
            more_questions=None if choice else self._estimate_more_questions(finalists), notes=self._notes,
        )  # fmt: skip

    def estimate(self) -> tuple[int, float | None]:
        """Return the maximum number of answers of `run`, and its time in seconds (None if answers are stored already).

        The time is extrapolated from the first chunk of the unpatched model, which `run` does not ask again.
        """
        chunk = self.search[: self.sizes[0]]
        if self.evaluator.is_cached(None, chunk):
            return self.total, None
        start = time.perf_counter()
        self._asked(None, chunk)
        self._done = 0  # `run` counts these answers
        return self.total, (time.perf_counter() - start) / len(chunk) * self.total

    def _build_trial(self, candidate: Setting) -> Trial:
        return Trial(candidate, predicted=self.evaluator.predict(candidate))

    def _select_usable_trials(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials that can run, save cost, and reach the target speed."""
        for trial in trials:
            reason = explain_unfit(trial.candidate, self.evaluator.videos)
            share = trial.get_expected_share(self._by)
            if reason is None and share is not None and share >= 1:
                reason = f"saves no cost: {share:.2f}x {self._by} (predicted)"
            target = reason is None and self.promise.target_ttft is not None
            if target and self._time(trial) and not self.promise.is_reached(trial.timing):
                reason = f"too slow: {trial.timing['ttft_ms']['p50']:.0f} ms to the first token"
            if reason is not None:
                trial.state = reason
        return [trial for trial in trials if not trial.state]

    def _time(self, trial: Trial) -> bool:
        """Time a trial once. Return False, and set the state of the trial, if timing fails."""
        if trial.timing is not None:
            return True
        self._step(f"timing {trial.candidate}", self._done, self.total)
        try:
            batch = self.objective == "throughput"
            trial.timing = self.evaluator.time(trial.candidate, self.search, self.repeats, batch)
        except (DataError, RunError):
            raise
        except TokenPruneError as error:
            trial.state = _format_skip_reason(error)
        return not trial.state

    def _halve_trials(self, alive: list[Trial]) -> list[Trial]:
        """Return the trials that answered all search questions and are not shown to lose too much."""
        places, asked = len(alive), 0
        for size in self.sizes:
            if not alive:
                return []
            chunk, first, asked = self.search[asked:size], not asked, size
            self._asked(None, chunk)
            if first:
                alive = [trial for trial in self._first(alive, chunk) if not self._is_hopeless(trial)]
                alive += self._first(self._select_usable_trials(self._add_stack_trials(alive)), chunk)
                places = len(alive)
            else:
                alive = [trial for trial in alive if self._results(trial, chunk, self.search[:size])]
            alive = [trial for trial in alive if not self._is_hopeless(trial)]
            if size == self.sizes[-1]:
                break
            places = max(CARRIED, math.ceil(places / 2))
            alive = self._best(alive, places, f"others promise more after {size} questions")
        return alive

    def _first(self, trials: list[Trial], chunk: Sequence[int]) -> list[Trial]:
        """Ask the first chunk, the cheapest trials first, and return the asked trials. Some trials are skipped."""
        for trial in sorted(trials, key=lambda trial: trial.get_expected_share(self._by) or 0.0):
            trial.state = explain_skip(trial, self.trials, self._by, FINALISTS) or ""
            if not trial.state:
                self._results(trial, chunk, chunk)
        return [trial for trial in trials if not trial.state]

    def _add_stack_trials(self, alive: list[Trial]) -> list[Trial]:
        """Return trials of stacks of answered settings."""
        if not self.stacks:
            return []
        stacks = propose_stacks(
            [StackPart.from_trial(trial, self._drops(trial, self.search[: trial.search]), self._by) for trial in alive],
            lambda candidate: self.evaluator.predict(candidate).get(self._by),
            lambda drops, saving: Estimate.from_drops(
                drops, saving, self.promise, len(self.held_out), compute_prior(saving, self.promise.max_drop)
            ),
            self.stacks,
        )
        known = {trial.candidate for trial in self.trials}
        trials = [self._build_trial(candidate) for candidate in stacks if candidate not in known]
        self.trials += trials
        return trials

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
            raise  # the run cannot continue, with any method
        except TokenPruneError as error:
            trial.state = _format_skip_reason(error)
            return False
        trial.search, trial.drop = len(so_far), float(self._drops(trial, so_far).mean())
        trial.cost = self.evaluator.cost(trial.candidate)
        return True

    def _drops(self, trial: Trial, numbers: Sequence[int]) -> np.ndarray:
        return self.evaluator.scores(None, numbers) - self.evaluator.scores(trial.candidate, numbers)

    def _is_hopeless(self, trial: Trial) -> bool:
        """Return True and stop the trial if the test of the negated drops shows that the drop exceeds the limit."""
        gains = -self._drops(trial, self.search[: trial.search])
        if is_below(gains, -self.promise.max_drop, self.promise.level):
            trial.state = f"loses too much after {trial.search} questions"
            return True
        return False

    def _estimate_of(self, trial: Trial) -> Estimate:
        by = self._stand_in if self._by in TIMED else self._by  # a prior without timing noise

        def saved(other: Trial) -> float:
            return max(0.0, 1 - other.get_price(by)[0])

        same = [other for other in self.trials if other.search and other.candidate.name == trial.candidate.name]
        lost, all_saved = (
            sum(other.search * get_value(other) for other in same) for get_value in (lambda other: other.drop, saved)
        )
        expected = compute_prior(saved(trial), self.promise.max_drop, lost, all_saved)
        drops = self._drops(trial, self.search[: trial.search])
        return Estimate.from_drops(drops, trial.saving(self._by), self.promise, len(self.held_out), expected)

    def _timed(self, trials: list[Trial]) -> list[Trial]:
        """Time trials before the test. If the times are too unsteady, rank by FLOPs and add a note."""
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
                f"Times are not reliable here: {widest.candidate} took {low:.2f} to {high:.2f} of the unpatched "
                f"time{instead}."
            )
        return trials

    def _select_finalists(self, alive: list[Trial]) -> list[Trial]:
        """Return the trials to test, the safest first."""
        estimates = [self._estimate_of(trial) for trial in alive]
        chosen = select_tests(estimates, FINALISTS)
        for index, (trial, estimate) in enumerate(zip(alive, estimates, strict=True)):
            if index in chosen:
                continue
            trial.state = "others promise more"
            if estimate.saving <= 0:
                trial.state = f"saves no cost: {1 - estimate.saving:.2f}x {self._by}"
            elif estimate.chance < CHANCE:
                trial.state = "loses too much in the search"
        return [alive[index] for index in chosen]

    def _tested(self, finalists: list[Trial]) -> tuple[Trial | None, dict[str, float]]:
        """Test from the safest to the cheapest, up to the first failure. The cheapest passed trial is the choice.

        A fixed-sequence test does not need a correction for the number of tests. The order depends only on answers of
        the search and on times, and is fixed before any held-out answer is read. A false promise requires a setting
        that loses too much and passes. Consider the first such setting in the order: every wrong pass is this setting
        or a later one, so this setting must have passed its own test, with a probability of at most 1 - confidence.
        This holds for any order and for any choice among the passed settings.
        """
        if not finalists:
            return None, {}
        self._asked(None, self.held_out)
        base = self.evaluator.scores(None, self.held_out)
        kinds = np.array([self.evaluator.kinds[index] for index in self.held_out])
        passed: list[Trial] = []
        for position, trial in enumerate(finalists):
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
                for other in finalists[position + 1 :]:
                    other.state = f"not tested: the safer {trial.candidate} failed"
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

    def _estimate_more_questions(self, finalists: list[Trial]) -> int | None:
        """Estimate the number of further questions that would prove the promise for the safest finalist.

        None if no number would help.
        """
        if not finalists or finalists[0].state != "not shown to keep the promise":
            return None
        drops, held = self._drops(finalists[0], [*self.search, *self.held_out]), len(self.held_out)
        needed = estimate_questions_needed(drops, self.promise.max_drop, self.promise.level, held, _MAX_FACTOR * held)
        if needed is None:
            return None
        more = (needed - held) * (len(self.search) + held) / held  # the same share is held out
        digit = 10 ** max(0, math.floor(math.log10(more)) - 1)
        return math.ceil(more / digit) * digit  # two digits: it is an estimate


def _format_skip_reason(error: TokenPruneError) -> str:
    return f"skipped: {str(error).splitlines()[0]}"


__all__ = ["FINALISTS", "Tuner"]
