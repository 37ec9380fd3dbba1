# SPDX-License-Identifier: Apache-2.0
"""The tuner's search, on made-up answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from made_up_panels import Fake, candidates
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.settings import Setting
from tokenprune_bench.errors import RunError
from tokenprune_bench.tuning import Promise, Tuner, betting, build_grid
from tokenprune_bench.tuning.estimate import Estimate, rank_by_safety, select_promoted, select_tests
from tokenprune_bench.tuning.objective import OBJECTIVES
from tokenprune_bench.tuning.question_split import split_questions
from tokenprune_bench.tuning.report import build_tuning_table, describe_outcome

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
    assert "not tested: the safer dart 0.5" in trials[2].state
    assert last not in {one for one, _ in fake.asked}


def test_nothing_may_keep_the_promise() -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.025, 0.9), "pool 0.5": (0.2, 0.5)}))
    found = Tuner(fake, list(fake.costs), Promise(0.02)).run()
    assert found.choice is None and found.more_questions is None and all(trial.state for trial in found.trials)
    said = describe_outcome(found)
    assert said[0] == (
        "None of 1 tested was shown to lose less than 2 points, with a confidence of 95 %; more questions would hardly "
        "help: larger keeps, or a larger drop may."
    )
    assert said[2] == (
        "Tested on 600 held-out questions, the safest first: dart 0.9. This promise needs at least 194 "
        "held-out questions, if no answer changes."
    )
    assert said[1].startswith("dart 0.9, the safest, lost ") and len(build_tuning_table(found).rows) == 1
    none = Tuner(Fake(900, {}), build_grid(["pevlm", "view_select"], [0.5]), Promise(0.02)).run()
    assert [trial.state for trial in none.trials] == [
        "pevlm works on videos, but these questions are about images only",
        "view_select chooses between the images of a prompt, so it cannot be tuned",
    ]
    assert describe_outcome(none) == ["No setting could be tried; --details prints the reasons."]
    slow = Fake(900, candidates({"dart 0.9": (0.0, 1.2)}))
    found = Tuner(slow, list(slow.costs), Promise(0.02)).run()
    assert found.trials[0].state == "saves no cost: 1.20x ttft" and not found.tested
    assert describe_outcome(found)[0].startswith("None of 1 settings was worth a test")


def test_an_answer_is_found_where_a_risky_setting_promises_more() -> None:
    """With so few questions hardly a loss may be seen: the cheapest is a gamble, and some settings lose nothing."""
    losses = {f"{name} 0.75": (0.0, 0.82) for name in ("dart", "fastv", "divprune")}
    losses |= {f"{name} 0.25": (0.015, 0.24) for name in ("pool", "dart", "fastv", "divprune")}
    for seed in range(5):
        fake = Fake(208, candidates(losses), seed)
        found = Tuner(fake, list(fake.costs), Promise(0.03), seed=seed).run()
        assert found.choice is not None, seed
        assert found.choice.bound <= 0.03 and found.tested[0].candidate.keep_text == "0.75"


def test_a_poor_method_does_not_block_the_others() -> None:
    """All lose nothing at their largest keep in the search; what their methods lose elsewhere says who is safe."""
    losses = {"pool 0.9": (0.0, 0.95), "fastv 0.75": (0.0, 0.82), "pool 0.5": (0.3, 0.5), "fastv 0.5": (0.0, 0.65)}
    fake = Fake(300, candidates(losses))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    pool = next(iter(fake.costs))
    fake.answers[pool][tuner.held_out[:40]] = 0  # what the search cannot know
    found = tuner.run()
    assert [str(one.candidate) for one in (found.tested[0], found.choice)] == ["fastv 0.75", "fastv 0.5"]


def test_a_bold_setting_that_was_lucky_in_the_search_does_not_come_first() -> None:
    """All answers of the search are kept at a quarter of the tokens; the mild setting changes none at all."""
    fake = Fake(208, candidates({"fastv 0.75": (0.0, 0.82), "fastv 0.25": (0.0, 0.49), "pool 0.25": (0.0, 0.24)}))
    mild, other, bold = fake.costs
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    fake.answers[other][tuner.search[:2]] = 0
    fake.answers[bold][tuner.held_out[:4]] = 0  # what the search cannot know
    found = tuner.run()
    assert found.tested[0].candidate == found.choice.candidate == mild
    assert bold in [one.candidate for one in found.tested]  # it is tried, but later


def test_the_mild_settings_are_carried_to_the_end_of_the_search() -> None:
    """Whatever bolder ones promise: of many that lose nothing, those that save little are still there."""
    losses = {
        f"{name} 0.25": (0.0, 0.24) for name in ("dart", "fastv", "divprune", "pool", "tome", "scope", "prumerge")
    }
    losses |= {"dart 0.75": (0.0, 0.72), "fastv 0.75": (0.0, 0.82), "pool 0.75": (0.0, 0.75)}
    fake = Fake(900, candidates(losses))
    fake.predicted = {one: {"flops": cost} for one, cost in fake.costs.items()}
    left = Tuner(fake, list(fake.costs), Promise(0.03)).search_only()
    assert {str(one.candidate) for one in left} >= {"dart 0.75", "fastv 0.75", "pool 0.75"} and len(left) == 8


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
        assert any("does not improve" in line for line in describe_outcome(found)) == tells
    fake.times = {safe: 1.2}
    found = Tuner(fake, list(fake.costs), Promise(0.03)).run()
    assert found.trials[0].state == "saves no cost: 1.20x ttft"


def test_how_many_more_questions_are_said() -> None:
    fake = Fake(300, candidates({"dart 0.9": (0.01, 0.9)}))
    tuner = Tuner(fake, list(fake.costs), Promise(0.02))
    (dart,) = fake.costs
    lost = [*tuner.search[:1], *tuner.held_out[:2]]
    fake.answers[dart] = np.array([float(number not in lost) for number in range(300)])
    found = tuner.run()
    assert found.choice is None and 50 < found.more_questions < 3000
    assert describe_outcome(found)[0].endswith(f"; ask about {found.more_questions} more questions.")
    # So many questions are indeed enough in about four of five worlds that lose as much, and half of them are not.
    rng = np.random.default_rng(7)

    def passing(questions: int) -> float:
        held = round(questions * 2 / 3)
        draws = rng.choice([1.0, 0.0], p=[0.01, 0.99], size=(200, held))
        return sum(betting.is_below(draw, 0.02, 0.05) for draw in draws) / 200

    assert 0.7 < passing(300 + found.more_questions) < 0.95 and passing(300 + found.more_questions // 4) < 0.7
    for seen in (np.full(100, 0.05), np.array([1.0] + [0.0] * 20), np.zeros(0)):
        assert betting.estimate_questions_needed(seen, 0.03, 0.05, 100, 10_000) is None
    assert betting.estimate_questions_needed(np.zeros(50), 0.03, 0.05, 20, 10_000) == pytest.approx(
        betting.count_questions_needed(0.03, 0.05), rel=0.05
    )


def test_many_games_are_played_at_once() -> None:
    draws = np.random.default_rng(3).choice([1.0, -1.0, 0.0], p=[0.04, 0.02, 0.94], size=(150, 6))
    together = betting.compute_wealth(draws, [0.05], 0.05)
    assert together.shape == (6,)
    assert together == pytest.approx([betting.compute_wealth(draws[:, game], [0.05], 0.05)[0] for game in range(6)])


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


def known(answers: str) -> tuple[Fake, list[Setting]]:
    fake = Fake(900, candidates({one: (0.0, float(one.split()[1])) for one in answers.split(", ")}))
    return fake, list(fake.costs)


def test_a_target_of_time_leaves_out_what_is_slower() -> None:
    fake, three = known("dart 0.9, dart 0.8, dart 0.5")
    fake.times = dict(zip(three, (0.15, 0.25, 0.55), strict=True))  # the other way round
    found = Tuner(fake, three, Promise(0.02, target_ttft="0.3x")).run()
    assert str(found.choice.candidate) == "dart 0.9"
    assert found.trials[2].state == "too slow: 50 ms to the first token" and not found.trials[2].search
    assert "TTFT 100.0 → 15.0 ms (0.15x)" in describe_outcome(found)[1] and sorted(fake.timed, key=str) == sorted(
        three, key=str
    )


def test_the_objective_says_what_is_made_small() -> None:
    chosen = {}
    for objective in ("ttft", "tokens", "flops", "kv"):
        fake, three = known("dart 0.9, dart 0.7, dart 0.5")
        fake.times = dict(zip(three, (0.6, 0.4, 0.7), strict=True))
        found = Tuner(fake, three, Promise(0.02), objective=objective).run()
        chosen[objective] = found.choice.candidate.keep_text
        assert found.objective == found.ranked_by == objective and not found.notes
        assert all(trial.timing for trial in found.tested)  # whatever is ranked by, time is told
        assert OBJECTIVES[objective] in build_tuning_table(found).notes[1]
    assert chosen == {"ttft": "0.7", "tokens": "0.5", "flops": "0.5", "kv": "0.9"}
    with pytest.raises(
        OptionError, match=r"objective 'foo' is not known\. Use one of ttft, throughput, tokens, flops, kv"
    ):
        Tuner(*known("dart 0.9"), Promise(0.02), objective="foo")


@pytest.mark.parametrize("objective", ["ttft", "kv"])
def test_times_that_are_not_reliable_rank_nothing_and_are_said(objective: str) -> None:
    fake, three = known("dart 0.9, dart 0.7, dart 0.5")
    fake.times, fake.spread = dict(zip(three, (0.6, 0.4, 0.7), strict=True)), 0.5
    found = Tuner(fake, three, Promise(0.02), objective=objective).run()
    *_, last = describe_outcome(found)
    assert (
        last.startswith("warning: Times are not reliable here: dart")
        and "x, not reliable)" in describe_outcome(found)[1]
    )
    instead = ": settings are ranked by prefill FLOPs instead."
    if objective == "ttft":
        assert found.ranked_by == "flops" and found.choice.candidate.keep_text == "0.5" and last.endswith(instead)
    else:
        assert found.ranked_by == "kv" and found.choice.candidate.keep_text == "0.9" and not last.endswith(instead)


def test_the_estimate_is_of_the_first_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, three = known("dart 0.9, dart 0.7, dart 0.5")
    clock = iter([10.0, 13.0])
    monkeypatch.setattr("tokenprune_bench.tuning.tuner.time.perf_counter", lambda: next(clock))
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
    assert describe_outcome(found)[-1].startswith("warning: more than 20 points lost in rare:")
    for given in ([dart], [dart, pool]):
        found = Tuner(fake, given, Promise(0.1, max_kind_drop=0.2)).run()
        assert found.choice is (None if given == [dart] else found.trials[1])
        assert "keeps the promise, but rare loses" in found.trials[0].state


def test_halves_are_stratified_and_keep_images_together() -> None:
    groups = [number // 2 for number in range(600)]
    kinds = ["odd" if group % 3 == 0 else "even" for group in groups]
    search, held = split_questions(groups, kinds, 0)
    assert sorted(search + held) == list(range(600)) and search != sorted(search)
    assert not {groups[number] for number in search} & {groups[number] for number in held}
    assert len(search) == 200
    for part in (search, held):
        assert sum(kinds[number] == "odd" for number in part) / len(part) == pytest.approx(1 / 3, abs=0.01)
    assert split_questions(groups, kinds, 0) == (search, held) != split_questions(groups, kinds, 1)


def test_half_of_the_places_go_to_the_safest() -> None:
    estimates = [Estimate(0.9, 0.4), Estimate(0.8, 0.5), Estimate(0.7, 0.5), Estimate(0.2, 0.9), Estimate(0.1, 0.9)]
    assert select_promoted(estimates, 2) == [1, 4]
    assert select_promoted(estimates, 4) == [1, 4, 0, 3]
    few, many = (Estimate.from_drops(np.zeros(count), 0.5, Promise(0.02), 800) for count in (40, 400))
    assert 0.5 < few.chance < many.chance < 1 and many.worth == 0.5 * many.chance
    assert Estimate.from_drops(np.ones(40), 0.5, Promise(0.02), 800).chance < 1e-6
    # Who changes nothing is safer than who wins three answers and loses one.
    lucky = np.array([-1.0] * 3 + [1.0] + [0.0] * 156)
    safe = Estimate.from_drops(np.zeros(160), 0.5, Promise(0.03), 320)
    assert Estimate.from_drops(lucky, 0.5, Promise(0.03), 320).chance < safe.chance


def test_the_sequence_goes_from_the_safest_to_the_cheapest() -> None:
    safe, even, cheap, poor = Estimate(0.2, 0.99), Estimate(0.25, 0.5), Estimate(0.8, 0.9), Estimate(0.9, 0.01)
    assert select_tests([cheap, even, safe], 4) == [2, 0]  # the even one saves less than what is safer
    assert select_tests([safe, poor], 4) == [0]
    assert select_tests([poor], 4) == [0]  # whatever its chance: there is nothing safer
    assert select_tests([], 4) == []
    assert select_tests([Estimate(-0.1, 0.9), safe], 4) == [1]  # slower than the unpatched model
    # A test that more likely ends the row than leads on is left out, and so is what does not fit.
    steps = [Estimate(0.1 + 0.2 * place, 0.9 - 0.2 * place) for place in range(4)]
    assert select_tests(steps, 1) == [0] and len(select_tests(steps, 3)) == 3
    assert select_tests([Estimate(0.2, 0.9), Estimate(0.21, 0.3), Estimate(0.9, 0.29)], 3) == [0, 2]
    order = rank_by_safety([Estimate(0.5, 0.7), Estimate(0.1, 0.7), Estimate(0.9, 0.8), Estimate(-0.1, 0.9)])
    assert order == [2, 1, 0, 3]
