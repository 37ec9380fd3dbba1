# SPDX-License-Identifier: Apache-2.0
"""The tuner: its test by hand and by simulation, its search on candidates whose accuracy is known, and the command."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import tokenprune
from tokenprune.bench.backend import HfBackend
from tokenprune.bench.group import Group
from tokenprune.bench.heldout import load_heldout
from tokenprune.bench.model import Model, load
from tokenprune.bench.run_folder import RunFolder, config_of
from tokenprune.cli import app
from tokenprune.errors import OptionError, RunError, TokenPruneError, UnsupportedSetupError
from tokenprune.tuning import Candidate, Panel, Promise, Search, Tuner, betting, grid
from tokenprune.tuning.estimate import Estimate, promote, safest, sequence
from tokenprune.tuning.objective import OBJECTIVES
from tokenprune.tuning.parts import check_enough, split
from tokenprune.tuning.promise import points, read_share
from tokenprune.tuning.report import outcome, tuned_config, tuning_table

# -- the test ----------------------------------------------------------------------------------------------------------


def naive_p_value(drops: Sequence[float], limit: float, level: float) -> float:
    """Question by question, in the words of the docstring."""
    owned = most = 1.0
    seen = [0.0, 1.0, 0.0, 1.0]  # imagined: mean 1/2, variance 1/4
    for place, drop in enumerate(drops):
        value, fair = (1 - drop) / 2, (1 - limit) / 2
        if most >= (1 - 1e-9) / level:
            break
        mean = sum(seen) / len(seen)
        variance = sum(one * one for one in seen) / len(seen) - mean**2
        needed = max(0.0, math.log(1 / level) - math.log(owned))
        bet = min(math.sqrt(2 * needed / (variance * (len(drops) - place))), 0.9 / fair)
        owned *= 1 + bet * (value - fair)
        most = max(most, owned)
        seen.append(value)
    return 1 / most


@pytest.mark.parametrize("level", [0.05, 0.2])
@pytest.mark.parametrize("limit", [-0.02, 0.02, 0.1])
def test_the_p_value_is_that_of_a_naive_loop(limit: float, level: float) -> None:
    rng = np.random.default_rng(0)
    for draw in (rng.choice([-1.0, 0.0, 1.0], p=[0.02, 0.95, 0.03], size=300), rng.uniform(-0.3, 0.2, size=200)):
        assert betting.p_value(draw, limit, level) == pytest.approx(naive_p_value(draw, limit, level), rel=1e-9)


@pytest.mark.parametrize(("lost", "won"), [(0.1, 0.0), (0.3, 0.2), (0.5, 0.4)])
def test_it_is_wrong_no_more_often_than_it_says(lost: float, won: float) -> None:
    """At the boundary, where the true drop is just what is not allowed; a bet that saw its own question would fail."""
    rng, runs, level = np.random.default_rng(1), 600, 0.1
    draws = rng.choice([1.0, -1.0, 0.0], p=[lost, won, 1 - lost - won], size=(runs, 80))
    wrong = sum(betting.is_below(draw, 0.1, level) for draw in draws) / runs
    assert wrong <= level + 3 * math.sqrt(level * (1 - level) / runs)
    # And it is of use: half the drop is seen to be below most of the time, where answers change little.
    if won == 0:
        few = rng.choice([1.0, 0.0], p=[0.03, 0.97], size=(100, 100))
        assert sum(betting.is_below(draw, 0.1, level) for draw in few) > 60


def test_no_change_at_all_is_no_proof_on_few_questions() -> None:
    """Where a bootstrap interval has no width."""
    for limit, level in ((0.1, 0.05), (0.1, 0.1), (0.3, 0.05)):
        needed = betting.questions_needed(limit, level)
        assert betting.is_below(np.zeros(needed), limit, level)
        assert not betting.is_below(np.zeros(needed - 1), limit, level)
        assert math.log(1 / level) / limit < needed < 1.6 * math.log(1 / level) / limit
    assert betting.p_value(np.zeros(0), 0.1, 0.05) == 1


def test_the_bound_is_where_the_test_begins_to_pass() -> None:
    drops = np.random.default_rng(2).choice([1.0, -1.0, 0.0], p=[0.05, 0.02, 0.93], size=300)
    bound = betting.upper_bound(drops, 0.05, step=0.01)
    assert drops.mean() < bound < 0.12
    assert betting.is_below(drops, bound, 0.05) and not betting.is_below(drops, bound - 0.01, 0.05)
    assert betting.upper_bound(np.ones(50), 0.05) == 1


# -- what is asked for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.5 %", 0.005), ("2pt", 0.02), ("3 pts", 0.03), (".02", 0.02)]
)
def test_drops_are_read(text: str, share: float) -> None:
    assert read_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["1", "0", "100%", "-1%", "one", "", "1%%", "2"])
def test_bad_drops_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"write 1%, 1pt or 0\.01"):
        read_share(text)


def test_bad_promises_are_refused() -> None:
    for bad in (
        {"max_drop": 0},
        {"max_kind_drop": 1.5},
        {"confidence": 1.0},
        {"confidence": 0.2},
        {"target_ttft": "2"},
    ):
        with pytest.raises(OptionError):
            Promise(**bad)
    assert Promise(target_ttft="0.5x").reached({"ttft_ratio": {"p50": 0.5}})
    assert not Promise(target_ttft="0.5x").reached({"ttft_ratio": {"p50": 0.51}})
    assert Promise(target_ttft="120ms").reached({"ttft_ms": {"p50": 119.0}})
    assert [points(share) for share in (0.01, 0.015, 0.1, 0.0233)] == [
        "1 point",
        "1.5 points",
        "10 points",
        "2.33 points",
    ]


def test_too_few_questions_are_said_before_any_work() -> None:
    with pytest.raises(OptionError, match=r"1 point at a confidence of 95 %: 66 .* held out, and it takes 391 .* 587"):
        check_enough(100, Promise(0.01))
    check_enough(587, Promise(0.01))
    with pytest.raises(OptionError, match="too few"):
        Tuner(Fake(60, {}), [], Promise(0.05))


# -- the search --------------------------------------------------------------------------------------------------------


class Fake:
    """A panel without a model. losses: for each candidate the share of right answers that it loses, and its cost."""

    videos = False

    def __init__(self, questions: int, losses: dict[Candidate, tuple[float, float]], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kinds, self.groups = [f"k{number % 2}" for number in range(questions)], list(range(questions))
        self.costs = {one: price for one, (_, price) in losses.items()}
        self.answers: dict[Candidate | None, np.ndarray] = {None: np.ones(questions)}
        for one, (loss, _) in losses.items():
            self.answers[one] = 1.0 - (rng.permutation(questions) < round(loss * questions))
        self.asked: list[tuple[Candidate | None, int]] = []
        self.broken: dict[Candidate, TokenPruneError] = {}
        self.times: dict[Candidate, float] = {}  # ratios of time; default: those of FLOPs
        self.timed: list[Candidate] = []
        self.spread = 0.1

    def ask(self, candidate: Candidate | None, chunk: Sequence[int], told: Callable[[int], None]) -> None:
        if candidate in self.broken:
            raise self.broken[candidate]
        self.asked += [(candidate, number) for number in chunk]
        told(len(chunk))

    def scores(self, candidate: Candidate | None, numbers: Sequence[int]) -> np.ndarray:
        asked = {number for one, number in self.asked if one == candidate}
        assert set(numbers) <= asked, "looks at answers that were not given"
        return self.answers[candidate][list(numbers)]

    def knows(self, candidate: Candidate | None, chunk: Sequence[int]) -> bool:
        return {(candidate, number) for number in chunk} <= set(self.asked)

    def cost(self, candidate: Candidate) -> dict[str, Any]:
        """FLOPs as they were given; tokens are their square, and the cache is larger where they are few."""
        ratio, asked = self.costs[candidate], sum(one == candidate for one, _ in self.asked)
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": 100 * ratio**2 * asked, "keep_ratio": ratio,
            "visual_tokens_in": 100 * asked, "kv_bytes": (1.05 - ratio) * 2048 * asked, "kv_bytes_full": 2048 * asked,
        }  # fmt: skip

    def time(self, candidate: Candidate, number: int, repeats: int) -> dict[str, Any]:
        self.timed.append(candidate)
        ratio = self.times.get(candidate, self.costs[candidate])
        quantiles = {"p20": ratio * (1 - self.spread / 2), "p50": ratio, "p80": ratio * (1 + self.spread / 2)}
        return {"ttft_ratio": quantiles, "ttft_ms": {"p50": 90 * ratio}, "ttft_ms_unpatched": {"p50": 100.0}}


def candidates(losses: dict[str, tuple[float, float]]) -> dict[Candidate, tuple[float, float]]:
    """From "dart 0.5" to a candidate."""
    return {Candidate.of({"method": one.split()[0], "keep": float(one.split()[1])}): two for one, two in losses.items()}


KNOWN = {
    "dart 0.9": (0.0, 0.9), "dart 0.7": (0.001, 0.7), "dart 0.5": (0.004, 0.5), "dart 0.3": (0.1, 0.3),
    "dart 0.1": (0.3, 0.1), "pool 0.9": (0.001, 0.95), "pool 0.7": (0.02, 0.75), "pool 0.5": (0.1, 0.55),
    "pool 0.3": (0.2, 0.35), "pool 0.1": (0.5, 0.15),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_that_keeps_the_promise_is_found(seed: int) -> None:
    fake = Fake(1500, candidates(KNOWN), seed)
    steps: list[tuple[int, int]] = []
    tuner = Tuner(
        fake, list(fake.costs), Promise(0.03), seed=seed, step=lambda _, done, total: steps.append((done, total))
    )
    found = tuner.run()
    assert str(found.choice.candidate) == "dart 0.5" and found.choice.state == "chosen"
    assert found.choice.bound <= 0.03 and found.choice.drop < 0.03
    assert all(trial.state for trial in found.trials)
    # Nobody is asked anything twice, the hopeless little, and only finalists what is held out.
    assert max(Counter(fake.asked).values()) == 1
    heard = Counter(one for one, _ in fake.asked)
    assert heard[None] == 1500 == found.search + found.held_out
    (worst,) = candidates({"pool 0.1": (0, 0)})
    assert heard[worst] == tuner.sizes[0] < 200
    (trial,) = (trial for trial in found.trials if trial.candidate == worst)
    assert trial.state == f"loses too much after {tuner.sizes[0]} questions"
    held = set(tuner.held_out)
    tested = [one for one in found.trials if one.held_out]
    assert {one for one, number in fake.asked if number in held} == {None, *(one.candidate for one in tested)}
    # The safest first, which here are the most expensive.
    order = dict.fromkeys(one for one, number in fake.asked if number in held and one is not None)
    assert [fake.costs[one] for one in order] == sorted((fake.costs[one] for one in order), reverse=True)
    assert steps[-1][0] <= steps[-1][1] and [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_testing_stops_at_the_first_that_fails() -> None:
    """Even if a cheaper one would pass: what was promised holds only for this order."""
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9), "dart 0.5": (0.0, 0.5), "dart 0.3": (0.0, 0.3)}))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    first, middle, last = fake.costs
    fake.answers[middle][tuner.held_out[:200]] = 0  # what the search cannot know
    trials = tuner.trials
    for trial in trials:
        trial.search, trial.cost = 1, fake.cost(trial.candidate)
    choice, _ = tuner._tested(trials)
    assert choice.candidate == first and [one.candidate for one in trials if one.held_out] == [first, middle]
    assert trials[1].state == "not shown to keep the promise"
    assert "not tested: dart 0.5, which was safer" in trials[2].state
    assert last not in {one for one, _ in fake.asked}


def test_nothing_may_keep_the_promise() -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.025, 0.9), "pool 0.5": (0.2, 0.5)}))
    found = Tuner(fake, list(fake.costs), Promise(0.02)).run()
    assert found.choice is None and found.more is None and all(trial.state for trial in found.trials)
    said = outcome(found)
    assert said[0] == (
        "None of 1 tested was shown to lose less than 2 points, with a confidence of 95 %; more questions would hardly "
        "help: larger keeps, or a larger drop may."
    )
    assert said[1].startswith("dart 0.9, the safest, lost ") and len(tuning_table(found).rows) == 1
    none = Tuner(Fake(900, {}), grid(["pevlm", "view_select"], [0.5]), Promise(0.02)).run()
    assert [trial.state for trial in none.trials] == [
        "pevlm acts on videos, and these questions are about images only",
        "view_select chooses between the images of a prompt: it has no budget to tune",
    ]
    assert outcome(none) == ["No setting could be tried; --verbose says why."]
    slow = Fake(900, candidates({"dart 0.9": (0.0, 1.2)}))
    found = Tuner(slow, list(slow.costs), Promise(0.02)).run()
    assert found.trials[0].state == "saves nothing: 1.20x ttft" and not found.tested
    assert outcome(found)[0].startswith("None of 1 settings was worth a test")


def test_an_answer_is_found_where_a_risky_setting_promises_more() -> None:
    """With so few questions hardly a loss may be seen: the cheapest is a gamble, and some settings lose nothing."""
    losses = {f"{name} 0.75": (0.0, 0.82) for name in ("dart", "fastv", "divprune")}
    losses |= {f"{name} 0.25": (0.015, 0.24) for name in ("pool", "dart", "fastv", "divprune")}
    for seed in range(5):
        fake = Fake(208, candidates(losses), seed)
        found = Tuner(fake, list(fake.costs), Promise(0.03), seed=seed).run()
        assert found.choice is not None, seed
        assert found.choice.bound <= 0.03 and found.tested[0].candidate.keep == "0.75"


def test_a_poor_method_does_not_block_the_others() -> None:
    """All lose nothing at their largest keep in the search; what their methods lose elsewhere says who is safe."""
    losses = {"pool 0.9": (0.0, 0.95), "fastv 0.75": (0.0, 0.82), "pool 0.5": (0.3, 0.5), "fastv 0.5": (0.0, 0.65)}
    fake = Fake(300, candidates(losses))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    pool = next(iter(fake.costs))
    fake.answers[pool][tuner.held_out[:40]] = 0  # what the search cannot know
    found = tuner.run()
    assert [str(one.candidate) for one in (found.tested[0], found.choice)] == ["fastv 0.75", "fastv 0.5"]


def test_times_that_happen_to_fall_badly_do_not_take_the_safest_away() -> None:
    """A few per cent of noise: the safest may look slower than the unpatched model, or its larger keep the faster."""
    fake = Fake(208, candidates({"fastv 0.75": (0.0, 0.82), "fastv 0.5": (0.0, 0.65)}))
    safe, other = fake.costs
    for ratio, tells in ((0.6, False), (1.03, True)):
        fake.times = {safe: ratio}
        tuner = Tuner(fake, [other, safe], Promise(0.03))
        fake.answers[other][tuner.held_out[:20]] = 0  # what the search cannot know
        found = tuner.run()
        assert found.tested[0].candidate == safe and found.choice.candidate == safe
        assert any("comes no sooner" in line for line in outcome(found)) == tells
    fake.times = {safe: 1.2}
    found = Tuner(fake, list(fake.costs), Promise(0.03)).run()
    assert found.trials[0].state == "saves nothing: 1.20x ttft"


def test_how_many_more_questions_are_said() -> None:
    fake = Fake(300, candidates({"dart 0.9": (0.01, 0.9)}))
    tuner = Tuner(fake, list(fake.costs), Promise(0.02))
    (dart,) = fake.costs
    lost = [*tuner.search[:1], *tuner.held_out[:2]]
    fake.answers[dart] = np.array([float(number not in lost) for number in range(300)])
    found = tuner.run()
    assert found.choice is None and 50 < found.more < 3000
    assert outcome(found)[0].endswith(f"; ask about {found.more} more questions.")
    # So many questions are indeed enough in about four of five worlds that lose as much, and half of them are not.
    rng = np.random.default_rng(7)

    def passing(questions: int) -> float:
        held = round(questions * 2 / 3)
        draws = rng.choice([1.0, 0.0], p=[0.01, 0.99], size=(200, held))
        return sum(betting.is_below(draw, 0.02, 0.05) for draw in draws) / 200

    assert 0.7 < passing(300 + found.more) < 0.95 and passing(300 + found.more // 4) < 0.7
    for seen in (np.full(100, 0.05), np.array([1.0] + [0.0] * 20), np.zeros(0)):
        assert betting.questions_likely(seen, 0.03, 0.05, 100, 10_000) is None
    assert betting.questions_likely(np.zeros(50), 0.03, 0.05, 20, 10_000) == pytest.approx(
        betting.questions_needed(0.03, 0.05), rel=0.05
    )


def test_many_games_are_played_at_once() -> None:
    draws = np.random.default_rng(3).choice([1.0, -1.0, 0.0], p=[0.04, 0.02, 0.94], size=(150, 6))
    together = betting.wealth(draws, [0.05], 0.05)
    assert together.shape == (6,)
    assert together == pytest.approx([betting.wealth(draws[:, game], [0.05], 0.05)[0] for game in range(6)])


def test_a_candidate_that_cannot_act_is_left_with_its_reason() -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9), "pool 0.5": (0.0, 0.5)}))
    dart, pool = fake.costs
    fake.broken[pool] = UnsupportedSetupError("not with this model\nand more")
    found = Tuner(fake, [dart, pool], Promise(0.02)).run()
    assert found.choice.candidate == dart
    assert found.trials[1].state == "skipped: not with this model"
    fake.broken[dart] = RunError("the disk is full")
    with pytest.raises(RunError):
        Tuner(fake, [dart, pool], Promise(0.02)).run()


def known(answers: str) -> tuple[Fake, list[Candidate]]:
    fake = Fake(900, candidates({one: (0.0, float(one.split()[1])) for one in answers.split(", ")}))
    return fake, list(fake.costs)


def test_a_target_of_time_leaves_out_what_is_slower() -> None:
    fake, three = known("dart 0.9, dart 0.8, dart 0.5")
    fake.times = dict(zip(three, (0.15, 0.25, 0.55), strict=True))  # the other way round
    found = Tuner(fake, three, Promise(0.02, target_ttft="0.3x")).run()
    assert str(found.choice.candidate) == "dart 0.9"
    assert found.trials[2].state == "too slow: 50 ms to the first token" and not found.trials[2].search
    assert "TTFT 100.0 → 15.0 ms (0.15x)" in outcome(found)[1] and sorted(fake.timed, key=str) == sorted(three, key=str)


def test_the_objective_says_what_is_made_small() -> None:
    chosen = {}
    for objective in ("ttft", "tokens", "flops", "kv"):
        fake, three = known("dart 0.9, dart 0.7, dart 0.5")
        fake.times = dict(zip(three, (0.6, 0.4, 0.7), strict=True))
        found = Tuner(fake, three, Promise(0.02), objective=objective).run()
        chosen[objective] = found.choice.candidate.keep
        assert found.objective == found.ranked_by == objective and not found.notes
        assert all(trial.timing for trial in found.tested)  # whatever is ranked by, time is told
        assert OBJECTIVES[objective] in tuning_table(found).notes[1]
    assert chosen == {"ttft": "0.7", "tokens": "0.5", "flops": "0.5", "kv": "0.9"}
    with pytest.raises(OptionError, match="objective 'foo' is none of ttft, tokens, flops, kv"):
        Tuner(*known("dart 0.9"), Promise(0.02), objective="foo")


@pytest.mark.parametrize("objective", ["ttft", "kv"])
def test_times_that_are_not_reliable_rank_nothing_and_are_said(objective: str) -> None:
    fake, three = known("dart 0.9, dart 0.7, dart 0.5")
    fake.times, fake.spread = dict(zip(three, (0.6, 0.4, 0.7), strict=True)), 0.5
    found = Tuner(fake, three, Promise(0.02), objective=objective).run()
    *_, last = outcome(found)
    assert (
        last.startswith("warning: Times are not reliable here, that of dart")
        and "x, not reliable)" in outcome(found)[1]
    )
    instead = ": settings are ranked by prefill FLOPs instead."
    if objective == "ttft":
        assert found.ranked_by == "flops" and found.choice.candidate.keep == "0.5" and last.endswith(instead)
    else:
        assert found.ranked_by == "kv" and found.choice.candidate.keep == "0.9" and not last.endswith(instead)


def test_the_estimate_is_of_the_first_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, three = known("dart 0.9, dart 0.7, dart 0.5")
    clock = iter([10.0, 13.0])
    monkeypatch.setattr("tokenprune.tuning.tuner.time.perf_counter", lambda: next(clock))
    steps: list[tuple[int, int]] = []
    tuner = Tuner(fake, three, Promise(0.02), step=lambda _, done, total: steps.append((done, total)))
    answers, seconds = tuner.estimate()
    assert answers == 300 * 4 + 600 * 4 and seconds == pytest.approx(3.0 / tuner.sizes[0] * answers)
    tuner.run()
    assert steps[-1] == (len(set(fake.asked)), answers)  # nothing is counted twice
    assert tuner.estimate() == (answers, None)


def test_a_kind_that_collapses_is_told_or_refused() -> None:
    fake = Fake(900, candidates({"dart 0.5": (0.0, 0.5), "pool 0.9": (0.0, 0.9)}))
    dart, pool = fake.costs
    fake.kinds = ["rare" if number % 30 == 0 else "usual" for number in range(900)]
    fake.answers[dart] = np.array(
        [0.0 if kind == "rare" and number % 4 else 1.0 for number, kind in enumerate(fake.kinds)]
    )
    found = Tuner(fake, [dart], Promise(0.1)).run()
    assert found.choice.candidate == dart and found.collapsed == ["rare"]
    assert outcome(found)[-1].startswith("warning: more than 20 points lost in rare:")
    for given in ([dart], [dart, pool]):
        found = Tuner(fake, given, Promise(0.1, max_kind_drop=0.2)).run()
        assert found.choice is (None if given == [dart] else found.trials[1])
        assert "keeps the promise, but rare loses" in found.trials[0].state


def test_halves_are_stratified_and_keep_images_together() -> None:
    groups = [number // 2 for number in range(600)]
    kinds = ["odd" if group % 3 == 0 else "even" for group in groups]
    search, held = split(groups, kinds, 0)
    assert sorted(search + held) == list(range(600)) and search != sorted(search)
    assert not {groups[number] for number in search} & {groups[number] for number in held}
    assert len(search) == 200
    for part in (search, held):
        assert sum(kinds[number] == "odd" for number in part) / len(part) == pytest.approx(1 / 3, abs=0.01)
    assert split(groups, kinds, 0) == (search, held) != split(groups, kinds, 1)


def test_half_of_the_places_go_to_the_safest() -> None:
    estimates = [Estimate(0.9, 0.4), Estimate(0.8, 0.5), Estimate(0.7, 0.5), Estimate(0.2, 0.9), Estimate(0.1, 0.9)]
    assert promote(estimates, 2) == [1, 3]
    assert promote(estimates, 4) == [1, 3, 0, 4]
    few, many = (Estimate.of(np.zeros(count), 0.5, Promise(0.02), 800) for count in (40, 400))
    assert 0.5 < few.chance < many.chance < 1 and many.worth == 0.5 * many.chance
    assert Estimate.of(np.ones(40), 0.5, Promise(0.02), 800).chance < 1e-6
    # Who changes nothing is safer than who wins three answers and loses one.
    lucky = np.array([-1.0] * 3 + [1.0] + [0.0] * 156)
    safe = Estimate.of(np.zeros(160), 0.5, Promise(0.03), 320)
    assert Estimate.of(lucky, 0.5, Promise(0.03), 320).chance < safe.chance


def test_the_sequence_goes_from_the_safest_to_the_cheapest() -> None:
    safe, even, cheap, poor = Estimate(0.2, 0.99), Estimate(0.25, 0.5), Estimate(0.8, 0.9), Estimate(0.9, 0.01)
    assert sequence([cheap, even, safe], 4) == [2, 0]  # the even one saves less than what is safer
    assert sequence([safe, poor], 4) == [0]
    assert sequence([poor], 4) == [0]  # whatever its chance: there is nothing safer
    assert sequence([], 4) == []
    assert sequence([Estimate(-0.1, 0.9), safe], 4) == [1]  # slower than the unpatched model
    # A test that more likely ends the row than leads on is left out, and so is what does not fit.
    steps = [Estimate(0.1 + 0.2 * place, 0.9 - 0.2 * place) for place in range(4)]
    assert sequence(steps, 1) == [0] and len(sequence(steps, 3)) == 3
    assert sequence([Estimate(0.2, 0.9), Estimate(0.21, 0.3), Estimate(0.9, 0.29)], 3) == [0, 2]
    assert safest([Estimate(0.5, 0.7), Estimate(0.1, 0.7), Estimate(0.9, 0.8)]) == [2, 0, 1]


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def subject() -> Model:
    return load(device="cpu")


def test_candidates_are_asked_without_the_guard(subject: Model, caplog: pytest.LogCaptureFixture) -> None:
    """With the processor, which methods on pixels get, it would read prompts, warn, and be timed with the method."""
    count = [one for one in load_heldout(limit=2) if one.kind == "count"]
    candidate = Candidate.of({"method": "downsample", "keep": 0.25})
    with caplog.at_level("WARNING", logger="tokenprune"):
        Panel(subject, count).ask(candidate, [0, 1])
    assert caplog.records == []


def test_the_panel_remembers_and_goes_on(subject: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = load_heldout(limit=1)
    (pool,) = grid(["pool"], [0.25])
    asked: list[int] = []
    generate = Model.generate

    def counted(self: Model, inputs: dict[str, Any], **options: Any) -> list[str]:
        asked.append(len(inputs["input_ids"]))
        return generate(self, inputs, **options)

    def opened(metric: str = "exact") -> RunFolder:
        return RunFolder(tmp_path / "run", config_of(subject, Search([pool.setting], 0, 3), metric, {}))

    monkeypatch.setattr(Model, "generate", counted)
    chunk = [5, 1, 3, 0]
    with opened() as folder:
        panel = Panel(subject, questions, batch_size=3, folder=folder)
        for one in (None, pool, pool):
            panel.ask(one, chunk)
        assert asked == [3, 1, 3, 1]
        with tokenprune.patched(subject.model, "pool", keep=0.25):
            chosen = [questions[number] for number in chunk]
            right = generate(subject, subject.inputs([q.images for q in chosen], [q.question for q in chosen]))
        scores = [float(q.is_right(one)) for q, one in zip(chosen, right, strict=True)]
        assert panel.scores(pool, chunk).tolist() == scores
        cost = panel.cost(pool)
        assert cost["keep_ratio"] == 0.25 and 0.2 < cost["prefill_flops_ratio"] < 0.3
    sizes: list[int] = []
    with opened() as folder:
        again = Panel(subject, questions, batch_size=3, folder=folder)
        assert again.knows(pool, chunk) and not again.knows(pool, [2])
        for one in (None, pool):
            again.ask(one, chunk, sizes.append)
        assert len(asked) == 4 and sizes == [4, 4]  # what was known is told, and not asked
        assert again.scores(pool, chunk).tolist() == scores and again.cost(pool) == cost
        again.ask(pool, [2, 4])
        assert asked[4:] == [2] and again.cost(pool)["visual_tokens_out"] == 6 * 64
    with pytest.raises(RunError, match='holds a run with metric "exact", and this one has "anls"'):
        opened("anls").__enter__()
    with pytest.raises(OptionError, match="cider cannot be tuned for"):
        Panel(subject, questions, "cider")


def test_processes_share_the_work_and_agree(subject: Model, tmp_path: Path) -> None:
    """Each asks its part of the batches; times are those of the first process."""
    questions, candidates = load_heldout(limit=5), grid(["pool", "uniform"], [0.5])
    alone = Tuner(Panel(subject, questions, batch_size=4), candidates, Promise(0.4), objective="kv", repeats=1).run()
    size = 2
    meeting, given, lock = threading.Barrier(size), [None] * size, threading.Lock()

    class Threads(Group):
        def gather(self, mine: Any) -> list[Any]:
            given[self.rank] = mine
            meeting.wait(60)
            everything = list(given)
            meeting.wait(60)
            return everything

    @dataclass
    class Locked(HfBackend):
        """Two processes would have a model each."""

        subject: Model

        def __post_init__(self) -> None:
            super().__init__(self.subject)
            self.answers = 0

        @contextmanager
        def answering(self, setting: Any) -> Iterator[Any]:
            def answer(number: int, batch: list[Any]) -> Any:
                with lock, HfBackend.answering(self, setting) as ask:
                    self.answers += len(batch)
                    return ask(number, batch)

            yield answer

    backends, found = [Locked(subject) for _ in range(size)], [None] * size

    def work(rank: int) -> None:
        with RunFolder(tmp_path / "run", {}, Threads(rank, size)) as folder:
            panel = Panel(backends[rank], questions, batch_size=4, folder=folder, group=folder.group)
            found[rank] = Tuner(panel, candidates, Promise(0.4), objective="kv", repeats=1).run()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for one in found:
        assert [(trial.state, trial.drop, trial.search, trial.held_out) for trial in one.trials] == [
            (trial.state, trial.drop, trial.search, trial.held_out) for trial in alone.trials
        ]
    assert found[0].choice.timing == found[1].choice.timing is not None
    asked = 40 + sum(trial.search + trial.held_out for trial in alone.trials)
    assert sum(one.answers for one in backends) == asked and min(one.answers for one in backends) > asked / 4


def tune(*arguments: object, code: int = 0) -> Result:
    fixed = "tune --device cpu --limit 5 --methods pool,pevlm --keep 0.5".split()
    result = CliRunner(env={"COLUMNS": "220"}).invoke(app, [*fixed, *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def test_the_command_writes_what_patch_reads(tmp_path: Path, subject: Model) -> None:
    out, run = tmp_path / "tokenprune.json", tmp_path / "run"
    result = tune("--max-drop", "40%", "--out", out, "--run", run)
    verdict, numbers, *_ = result.stdout.splitlines()
    assert verdict == "pool, keep 0.5: less than 40 points lost, with a confidence of 95 %."
    assert re.match(
        r"accuracy % \d+\.\d → \d+\.\d on 24 held-out questions \(shown: less than .* points lost\); ", numbers
    )
    assert "visual tokens 256 → 128 (50%" in numbers and re.search(r"TTFT \d.* → \d.* ms \(\d\.\d\dx", numbers)
    assert re.search(r"KV cache 12\d\d → 6\d\d KiB \(5\d%\); prefill FLOPs 47%\.$", numbers)
    # Only what was tested is shown, and where it is no terminal no bar.
    assert "chosen" in result.stdout and "pevlm" not in result.stdout
    assert "1 more settings were not tested: --verbose says why." in result.stdout
    assert re.fullmatch(r"2 settings, 40 questions: at most \d+ answers, about \d+ \w+\n", result.stderr)
    written = json.loads(out.read_text())
    assert written["setting"] == {"method": "pool", "keep": 0.5}
    tuned = written["tuned"]
    assert tuned["promise"] == {"max_drop": 0.4, "confidence": 0.95, "max_kind_drop": None, "target_ttft": None}
    assert tuned["questions"] == {"search": 16, "held_out": 24} and tuned["measured"]["drop_below"] <= 0.4
    assert tuned["objective"] == "ttft" and tuned["ranked_by"] in ("ttft", "flops")
    cost = tuned["cost"]
    assert (cost["visual_tokens"], cost["visual_tokens_unpatched"]) == (128, 256)
    assert cost["kv_bytes"] / cost["kv_bytes_unpatched"] == pytest.approx(cost["kv_ratio"]) != 1
    assert cost["ttft_ms"] == pytest.approx(cost["ttft_ratio"] * cost["ttft_ms_unpatched"])
    assert tuned["data"]["name"] == "held-out set of tokenprune" and len(tuned["measured"]["kinds"]) == 8
    assert tuned["environment"]["tokenprune"] == tokenprune.__version__ and str(tmp_path) not in out.read_text()
    with tokenprune.patched(subject.model, config=out):
        assert "pool" in subject.model._tokenprune_patch.describe()
    # The answers were kept: this asks the model nothing, and finds that nothing keeps a stricter promise.
    out.unlink()
    stricter = ["--max-drop", "15%", "--confidence", "0.9", "--max-kind-drop", "0.1%", "--verbose"]
    again = tune(*stricter, "--out", out, "--run", run, code=1)
    assert again.stdout.startswith("None of 1 tested was shown to lose less than 15 points") and not out.exists()
    assert "pevlm acts on videos" in again.stdout and "goes on where it stopped" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-drop", "1%"], "40 questions are too few for a drop below 1 point"),
        (["--max-drop", "1"], "write 1%, 1pt or 0.01"),
        (["--methods", "pol"], "did you mean 'pool'"),
        (["--target-ttft", "fast"], 'write "0.5x"'),
        (["--objective", "foo"], "objective 'foo' is none of ttft, tokens, flops, kv"),
        (["--out", "gone/tokenprune.json"], "there is no folder gone"),
        (["--data", "gone.jsonl"], "there is no gone.jsonl"),
        (["--metric", "cidr"], "there is no metric"),
        (["--metric", "cider"], "cider cannot be tuned for"),
    ],
)
def test_what_cannot_work_is_said_before_the_model_is_loaded(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokenprune.bench.model.load", lambda *args, **options: pytest.fail("the model was loaded"))
    result = tune("--max-drop", "40%", *arguments, code=2)
    assert says in result.stderr and result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_configuration_says_what_was_promised(subject: Model) -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9)}))
    found = Tuner(fake, list(fake.costs), Promise(0.02)).run()
    config = tuned_config(found, Panel(subject, load_heldout(limit=1)), {"name": "mine"})
    assert config.setting == {"method": "dart", "keep": 0.9}
    assert config.tuned["measured"] | {"kinds": None} == {
        "unpatched": 1.0, "tuned": 1.0, "drop": 0.0, "drop_below": found.choice.bound, "kinds": None
    }  # fmt: skip
    cost = {name: round(value, 9) for name, value in config.tuned["cost"].items()}
    assert cost == {
        "prefill_flops_ratio": 0.9, "keep_ratio": 0.9, "visual_tokens": 81, "visual_tokens_unpatched": 100,
        "kv_ratio": 0.15, "kv_bytes": 307.2, "kv_bytes_unpatched": 2048, "ttft_ratio": 0.9, "ttft_ms": 90,
        "ttft_ms_unpatched": 100, "ttft_reliable": True,
    }  # fmt: skip
    assert config.tuned["tested"] == 1 and config.tuned["objective"] == config.tuned["ranked_by"] == "ttft"


def test_rows_that_do_not_fit_the_model_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"image": str(one.path), "question": one.question, "answer": one.answer, "kind": one.kind}
        for one in load_heldout(limit=5)
    ]
    rows[2]["question"] = "<image> " + rows[2]["question"]
    data, out = tmp_path / "mine.jsonl", tmp_path / "tokenprune.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    given = ["--limit", 0, "--max-drop", "40%", "--objective", "kv", "--data", data, "--out", out]
    rows_only = tmp_path / "rows.jsonl"
    rows_only.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "line 3 has '<image>'" in tune(*given, "--data", rows_only, code=2).stderr
    result = tune(*given, "--skip-bad")
    said = [line for line in result.stderr.splitlines() if line.startswith("skipped: ")]
    assert [line[:17] for line in said] == ["skipped: line 3: ", "skipped: line 41:"]
    tuned = json.loads(out.read_text())["tuned"]
    assert tuned["data"]["questions"] == 39 == sum(tuned["questions"].values()) and len(tuned["data"]["skipped"]) == 2
    assert tuned["objective"] == tuned["ranked_by"] == "kv"
