# SPDX-License-Identifier: Apache-2.0
"""The tuner's search on simulated answers."""

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

LOSSES = {
    "dart 0.9": (0.0, 0.9), "dart 0.7": (0.001, 0.7), "dart 0.5": (0.004, 0.5), "dart 0.3": (0.1, 0.3),
    "dart 0.1": (0.3, 0.1), "pool 0.9": (0.001, 0.95), "pool 0.7": (0.02, 0.75), "pool 0.5": (0.1, 0.55),
    "pool 0.3": (0.2, 0.35), "pool 0.1": (0.5, 0.15),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_the_cheapest_setting_within_the_promise_is_chosen(seed: int) -> None:
    fake = Fake(1500, candidates(LOSSES), seed)
    steps: list[tuple[int, int]] = []
    tuner = Tuner(
        fake, list(fake.costs), Promise(0.03), seed=seed, step=lambda _, done, total: steps.append((done, total))
    )
    tuning = tuner.run()
    assert str(tuning.choice.candidate) == "dart 0.5" and tuning.choice.state == "chosen"
    assert tuning.choice.bound <= 0.03 and tuning.choice.drop < 0.03
    assert all(trial.state for trial in tuning.trials)
    # No question is asked twice, poor candidates answer few, and only finalists answer held-out questions.
    assert max(Counter(fake.asked).values()) == 1
    num_answers = Counter(candidate for candidate, _ in fake.asked)
    assert num_answers[None] == 1500 == tuning.search + tuning.held_out
    (worst,) = candidates({"pool 0.1": (0, 0)})
    assert num_answers[worst] == tuner.sizes[0] < 200
    (trial,) = (trial for trial in tuning.trials if trial.candidate == worst)
    assert trial.state == f"loses too much after {tuner.sizes[0]} questions"
    held_out = set(tuner.held_out)
    tested = [trial for trial in tuning.trials if trial.held_out]
    assert {candidate for candidate, index in fake.asked if index in held_out} == {
        None,
        *(trial.candidate for trial in tested),
    }
    # The safest settings are tested first. Here these are the most expensive.
    order = dict.fromkeys(candidate for candidate, index in fake.asked if index in held_out and candidate is not None)
    assert [fake.costs[candidate] for candidate in order] == sorted(
        (fake.costs[candidate] for candidate in order), reverse=True
    )
    assert steps[-1][0] <= steps[-1][1] and [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_testing_stops_at_the_first_failure() -> None:
    """The statistical guarantee does not cover tests after a failure, even if a cheaper setting would pass."""
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9), "dart 0.5": (0.0, 0.5), "dart 0.3": (0.0, 0.3)}))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    first, middle, last = fake.costs
    fake.answers[middle][tuner.held_out[:200]] = 0  # the search does not see held-out answers
    trials = tuner.trials
    for trial in trials:
        trial.search, trial.cost = 1, fake.cost(trial.candidate)
    choice, _ = tuner._tested(trials)
    assert choice.candidate == first and [trial.candidate for trial in trials if trial.held_out] == [first, middle]
    assert trials[1].state == "not shown to keep the promise"
    assert "not tested: the safer dart 0.5" in trials[2].state
    assert last not in {candidate for candidate, _ in fake.asked}


def test_no_setting_keeps_the_promise() -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.025, 0.9), "pool 0.5": (0.2, 0.5)}))
    tuning = Tuner(fake, list(fake.costs), Promise(0.02)).run()
    assert tuning.choice is None and tuning.more_questions is None and all(trial.state for trial in tuning.trials)
    lines = describe_outcome(tuning)
    assert lines[0] == (
        "None of 1 tested was shown to lose less than 2 points, with a confidence of 95 %; more questions would hardly "
        "help: larger keeps, or a larger drop may."
    )
    assert lines[2] == (
        "Tested on 600 held-out questions, the safest first: dart 0.9. This promise needs at least 194 "
        "held-out questions, if no answer changes."
    )
    assert lines[1].startswith("dart 0.9, the safest, lost ") and len(build_tuning_table(tuning).rows) == 1
    none = Tuner(Fake(900, {}), build_grid(["pevlm", "view_select"], [0.5]), Promise(0.02)).run()
    assert [trial.state for trial in none.trials] == [
        "pevlm works on videos, but these questions are about images only",
        "view_select chooses between the images of a prompt, so it cannot be tuned",
    ]
    assert describe_outcome(none) == ["No setting could be tried; --details prints the reasons."]
    slow = Fake(900, candidates({"dart 0.9": (0.0, 1.2)}))
    tuning = Tuner(slow, list(slow.costs), Promise(0.02)).run()
    assert tuning.trials[0].state == "saves no cost: 1.20x ttft" and not tuning.tested
    assert describe_outcome(tuning)[0].startswith("None of 1 settings was worth a test")


def test_mild_settings_are_chosen_with_few_questions() -> None:
    """With few questions, a risky setting is cheaper but hardly testable. Some mild settings lose no score."""
    losses = {f"{name} 0.75": (0.0, 0.82) for name in ("dart", "fastv", "divprune")}
    losses |= {f"{name} 0.25": (0.015, 0.24) for name in ("pool", "dart", "fastv", "divprune")}
    for seed in range(5):
        fake = Fake(208, candidates(losses), seed)
        tuning = Tuner(fake, list(fake.costs), Promise(0.03), seed=seed).run()
        assert tuning.choice is not None, seed
        assert tuning.choice.bound <= 0.03 and tuning.tested[0].candidate.keep_text == "0.75"


def test_a_poor_method_does_not_block_the_others() -> None:
    """The largest keeps lose no score in the search. Losses at smaller keeps show that pool is less safe."""
    losses = {"pool 0.9": (0.0, 0.95), "fastv 0.75": (0.0, 0.82), "pool 0.5": (0.3, 0.5), "fastv 0.5": (0.0, 0.65)}
    fake = Fake(300, candidates(losses))
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    pool = next(iter(fake.costs))
    fake.answers[pool][tuner.held_out[:40]] = 0  # the search does not see held-out answers
    tuning = tuner.run()
    assert [str(trial.candidate) for trial in (tuning.tested[0], tuning.choice)] == ["fastv 0.75", "fastv 0.5"]


def test_a_lucky_setting_is_not_tested_first() -> None:
    """The bold setting loses no score in the search but several held-out answers. The mild setting loses none."""
    fake = Fake(208, candidates({"fastv 0.75": (0.0, 0.82), "fastv 0.25": (0.0, 0.49), "pool 0.25": (0.0, 0.24)}))
    mild, other, bold = fake.costs
    tuner = Tuner(fake, list(fake.costs), Promise(0.03))
    fake.answers[other][tuner.search[:2]] = 0
    fake.answers[bold][tuner.held_out[:4]] = 0  # the search does not see held-out answers
    tuning = tuner.run()
    assert tuning.tested[0].candidate == tuning.choice.candidate == mild
    assert bold in [trial.candidate for trial in tuning.tested]  # tested, but later


def test_mild_settings_reach_the_end_of_the_search() -> None:
    """Many bold settings lose no score and save more, but the mild settings remain."""
    losses = {
        f"{name} 0.25": (0.0, 0.24) for name in ("dart", "fastv", "divprune", "pool", "tome", "scope", "prumerge")
    }
    losses |= {"dart 0.75": (0.0, 0.72), "fastv 0.75": (0.0, 0.82), "pool 0.75": (0.0, 0.75)}
    fake = Fake(900, candidates(losses))
    fake.predicted = {setting: {"flops": cost} for setting, cost in fake.costs.items()}
    remaining = Tuner(fake, list(fake.costs), Promise(0.03)).search_only()
    assert {str(trial.candidate) for trial in remaining} >= {"dart 0.75", "fastv 0.75", "pool 0.75"} and len(
        remaining
    ) == 8


def test_noisy_times_do_not_exclude_the_safest_setting() -> None:
    """With a few percent of noise, the safest setting can look slower than the unpatched model or a smaller keep."""
    fake = Fake(208, candidates({"fastv 0.75": (0.0, 0.82), "fastv 0.5": (0.0, 0.65)}))
    safe, other = fake.costs
    for ratio, is_noted in ((0.6, False), (1.03, True)):
        fake.times = {safe: ratio}
        tuner = Tuner(fake, [other, safe], Promise(0.03))
        fake.answers[other][tuner.held_out[:20]] = 0  # the search does not see held-out answers
        tuning = tuner.run()
        assert tuning.tested[0].candidate == safe and tuning.choice.candidate == safe
        assert any("does not improve" in line for line in describe_outcome(tuning)) == is_noted
    fake.times = {safe: 1.2}
    tuning = Tuner(fake, list(fake.costs), Promise(0.03)).run()
    assert tuning.trials[0].state == "saves no cost: 1.20x ttft"


def test_the_number_of_missing_questions_is_reported() -> None:
    fake = Fake(300, candidates({"dart 0.9": (0.01, 0.9)}))
    tuner = Tuner(fake, list(fake.costs), Promise(0.02))
    (dart,) = fake.costs
    wrong = [*tuner.search[:1], *tuner.held_out[:2]]
    fake.answers[dart] = np.array([float(index not in wrong) for index in range(300)])
    tuning = tuner.run()
    assert tuning.choice is None and 50 < tuning.more_questions < 3000
    assert describe_outcome(tuning)[0].endswith(f"; ask about {tuning.more_questions} more questions.")
    # The reported number suffices in about four of five simulated worlds with this loss. A quarter does not.
    rng = np.random.default_rng(7)

    def pass_rate(questions: int) -> float:
        num_held_out = round(questions * 2 / 3)
        draws = rng.choice([1.0, 0.0], p=[0.01, 0.99], size=(200, num_held_out))
        return sum(betting.is_below(draw, 0.02, 0.05) for draw in draws) / 200

    assert 0.7 < pass_rate(300 + tuning.more_questions) < 0.95 and pass_rate(300 + tuning.more_questions // 4) < 0.7
    for drops in (np.full(100, 0.05), np.array([1.0] + [0.0] * 20), np.zeros(0)):
        assert betting.estimate_questions_needed(drops, 0.03, 0.05, 100, 10_000) is None
    assert betting.estimate_questions_needed(np.zeros(50), 0.03, 0.05, 20, 10_000) == pytest.approx(
        betting.count_questions_needed(0.03, 0.05), rel=0.05
    )


def test_wealth_of_several_columns() -> None:
    draws = np.random.default_rng(3).choice([1.0, -1.0, 0.0], p=[0.04, 0.02, 0.94], size=(150, 6))
    together = betting.compute_wealth(draws, [0.05], 0.05)
    assert together.shape == (6,)
    assert together == pytest.approx([betting.compute_wealth(draws[:, game], [0.05], 0.05)[0] for game in range(6)])


def test_unsupported_candidates_are_skipped() -> None:
    fake = Fake(900, candidates({"dart 0.9": (0.0, 0.9), "pool 0.5": (0.0, 0.5)}))
    dart, pool = fake.costs
    fake.broken[pool] = UnsupportedSetupError("not with this model\nand more")
    tuning = Tuner(fake, [dart, pool], Promise(0.02)).run()
    assert tuning.choice.candidate == dart
    assert tuning.trials[1].state == "skipped: not with this model"
    fake.broken[dart] = RunError("the disk is full")
    with pytest.raises(RunError):
        Tuner(fake, [dart, pool], Promise(0.02)).run()


def build_panel(answers: str) -> tuple[Fake, list[Setting]]:
    fake = Fake(900, candidates({text: (0.0, float(text.split()[1])) for text in answers.split(", ")}))
    return fake, list(fake.costs)


def test_a_target_time_excludes_slower_settings() -> None:
    fake, settings = build_panel("dart 0.9, dart 0.8, dart 0.5")
    fake.times = dict(zip(settings, (0.15, 0.25, 0.55), strict=True))  # in reverse order of the costs
    tuning = Tuner(fake, settings, Promise(0.02, target_ttft="0.3x")).run()
    assert str(tuning.choice.candidate) == "dart 0.9"
    assert tuning.trials[2].state == "too slow: 50 ms to the first token" and not tuning.trials[2].search
    assert "TTFT 100.0 → 15.0 ms (0.15x)" in describe_outcome(tuning)[1] and sorted(fake.timed, key=str) == sorted(
        settings, key=str
    )


def test_objectives() -> None:
    chosen = {}
    for objective in ("ttft", "tokens", "flops", "kv"):
        fake, settings = build_panel("dart 0.9, dart 0.7, dart 0.5")
        fake.times = dict(zip(settings, (0.6, 0.4, 0.7), strict=True))
        tuning = Tuner(fake, settings, Promise(0.02), objective=objective).run()
        chosen[objective] = tuning.choice.candidate.keep_text
        assert tuning.objective == tuning.ranked_by == objective and not tuning.notes
        assert all(trial.timing for trial in tuning.tested)  # times are reported for each objective
        assert OBJECTIVES[objective] in build_tuning_table(tuning).notes[1]
    assert chosen == {"ttft": "0.7", "tokens": "0.5", "flops": "0.5", "kv": "0.9"}
    with pytest.raises(
        OptionError, match=r"objective 'foo' is not known\. Use one of ttft, throughput, tokens, flops, kv"
    ):
        Tuner(*build_panel("dart 0.9"), Promise(0.02), objective="foo")


@pytest.mark.parametrize("objective", ["ttft", "kv"])
def test_unreliable_times_are_reported_and_not_ranked(objective: str) -> None:
    fake, settings = build_panel("dart 0.9, dart 0.7, dart 0.5")
    fake.times, fake.spread = dict(zip(settings, (0.6, 0.4, 0.7), strict=True)), 0.5
    tuning = Tuner(fake, settings, Promise(0.02), objective=objective).run()
    *_, last = describe_outcome(tuning)
    assert (
        last.startswith("warning: Times are not reliable here: dart")
        and "x, not reliable)" in describe_outcome(tuning)[1]
    )
    replacement = ": settings are ranked by prefill FLOPs instead."
    if objective == "ttft":
        assert tuning.ranked_by == "flops" and tuning.choice.candidate.keep_text == "0.5" and last.endswith(replacement)
    else:
        assert (
            tuning.ranked_by == "kv" and tuning.choice.candidate.keep_text == "0.9" and not last.endswith(replacement)
        )


def test_the_estimated_duration_follows_the_first_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, settings = build_panel("dart 0.9, dart 0.7, dart 0.5")
    clock = iter([10.0, 13.0])
    monkeypatch.setattr("tokenprune_bench.tuning.tuner.time.perf_counter", lambda: next(clock))
    steps: list[tuple[int, int]] = []
    tuner = Tuner(fake, settings, Promise(0.02), step=lambda _, done, total: steps.append((done, total)))
    answers, seconds = tuner.estimate()
    assert answers == 300 * 4 + 600 * 4 and seconds == pytest.approx(3.0 / tuner.sizes[0] * answers)
    tuner.run()
    assert steps[-1] == (len(set(fake.asked)), answers)  # no question is counted twice
    assert tuner.estimate() == (answers, None)


def test_a_collapsed_kind_is_reported_or_refused() -> None:
    fake = Fake(900, candidates({"dart 0.5": (0.0, 0.5), "pool 0.9": (0.0, 0.9)}))
    dart, pool = fake.costs
    fake.kinds = ["rare" if index % 30 == 0 else "usual" for index in range(900)]
    fake.answers[dart] = np.array(
        [0.0 if kind == "rare" and index % 4 else 1.0 for index, kind in enumerate(fake.kinds)]
    )
    tuning = Tuner(fake, [dart], Promise(0.1)).run()
    assert tuning.choice.candidate == dart and tuning.collapsed == ["rare"]
    assert describe_outcome(tuning)[-1].startswith("warning: more than 20 points lost in rare:")
    for settings in ([dart], [dart, pool]):
        tuning = Tuner(fake, settings, Promise(0.1, max_kind_drop=0.2)).run()
        assert tuning.choice is (None if settings == [dart] else tuning.trials[1])
        assert "keeps the promise, but rare loses" in tuning.trials[0].state


def test_question_splits_are_stratified_by_kind_and_image() -> None:
    groups = [index // 2 for index in range(600)]
    kinds = ["odd" if group % 3 == 0 else "even" for group in groups]
    search, held_out = split_questions(groups, kinds, 0)
    assert sorted(search + held_out) == list(range(600)) and search != sorted(search)
    assert not {groups[index] for index in search} & {groups[index] for index in held_out}
    assert len(search) == 200
    for part in (search, held_out):
        assert sum(kinds[index] == "odd" for index in part) / len(part) == pytest.approx(1 / 3, abs=0.01)
    assert split_questions(groups, kinds, 0) == (search, held_out) != split_questions(groups, kinds, 1)


def test_half_of_the_promoted_settings_are_the_safest() -> None:
    estimates = [Estimate(0.9, 0.4), Estimate(0.8, 0.5), Estimate(0.7, 0.5), Estimate(0.2, 0.9), Estimate(0.1, 0.9)]
    assert select_promoted(estimates, 2) == [1, 4]
    assert select_promoted(estimates, 4) == [1, 4, 0, 3]
    few, many = (Estimate.from_drops(np.zeros(count), 0.5, Promise(0.02), 800) for count in (40, 400))
    assert 0.5 < few.chance < many.chance < 1 and many.worth == 0.5 * many.chance
    assert Estimate.from_drops(np.ones(40), 0.5, Promise(0.02), 800).chance < 1e-6
    # A setting without changes is safer than a setting that wins three answers and loses one.
    lucky = np.array([-1.0] * 3 + [1.0] + [0.0] * 156)
    safe = Estimate.from_drops(np.zeros(160), 0.5, Promise(0.03), 320)
    assert Estimate.from_drops(lucky, 0.5, Promise(0.03), 320).chance < safe.chance


def test_tests_run_from_the_safest_to_the_cheapest() -> None:
    safe, even, cheap, poor = Estimate(0.2, 0.99), Estimate(0.25, 0.5), Estimate(0.8, 0.9), Estimate(0.9, 0.01)
    assert select_tests([cheap, even, safe], 4) == [2, 0]  # the even setting saves less than a safer setting
    assert select_tests([safe, poor], 4) == [0]
    assert select_tests([poor], 4) == [0]  # no safer setting exists
    assert select_tests([], 4) == []
    assert select_tests([Estimate(-0.1, 0.9), safe], 4) == [1]  # slower than the unpatched model
    # Skip a test that is more likely to end the sequence than to continue it, and tests beyond the maximum.
    steps = [Estimate(0.1 + 0.2 * index, 0.9 - 0.2 * index) for index in range(4)]
    assert select_tests(steps, 1) == [0] and len(select_tests(steps, 3)) == 3
    assert select_tests([Estimate(0.2, 0.9), Estimate(0.21, 0.3), Estimate(0.9, 0.29)], 3) == [0, 2]
    order = rank_by_safety([Estimate(0.5, 0.7), Estimate(0.1, 0.7), Estimate(0.9, 0.8), Estimate(-0.1, 0.9)])
    assert order == [2, 1, 0, 3]
