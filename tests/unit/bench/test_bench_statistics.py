# SPDX-License-Identifier: Apache-2.0
"""Test the benchmark's statistics: intervals, tests, quantiles, comparisons of two methods, and hard questions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from each import each
from tokenprune_bench import paired, results, significance
from tokenprune_bench.metrics import METRICS
from tokenprune_bench.profiling import timing


def test_wilson_by_hand() -> None:
    # z = 1.959964: 8 of 10 gives (0.8 + z²/20 ± z sqrt(0.16/10 + z²/400)) / (1 + z²/10).
    assert significance.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert significance.wilson(0, 4) == pytest.approx((0.0, 0.4899), abs=1e-4)
    assert significance.wilson(4, 4) == pytest.approx((0.5101, 1.0), abs=1e-4)
    assert significance.wilson(0, 0) == (0.0, 1.0)


def test_pooling_seeds_does_not_narrow_the_interval() -> None:
    once = significance.pooled_interval(["1110"])
    assert significance.pooled_interval(["1110"] * 3) == once
    share, low, high = significance.pooled_interval(["1100", "1110", "1111"])
    assert share == 0.75
    assert (low, high) == significance.wilson(3, 4)


@pytest.mark.parametrize(
    ("ours", "theirs", "p"),
    [
        ("11111", "00000", 1 / 32),  # five wins and no loss: (1/2)^5
        ("1110", "0001", 5 / 16),  # three wins and one loss: P(X >= 3 of 4)
        ("0011", "0011", 1.0),  # no discordant pair
        ("0000", "1111", 1.0),
        ("1100", "0011", 11 / 16),
    ],
)
def test_mcnemar_by_hand(ours: str, theirs: str, p: float) -> None:
    assert significance.better_p(ours, theirs) == pytest.approx(p)


def test_interleaving_takes_each_question_once_and_every_seed() -> None:
    assert significance.interleave_seeds(["aaaa", "bbbb", "cccc"]) == "abca"
    assert significance.interleave_seeds(["1010"]) == "1010"


def test_quantiles_by_hand() -> None:
    assert timing.compute_quantiles([5, 1, 2, 4, 3]) == {"p20": 1.8, "p50": 3, "p80": 4.2}
    assert timing.compute_quantiles([7.0]) == {"p20": 7, "p50": 7, "p80": 7}


def test_holm_compares_the_smallest_with_the_whole_family_and_keeps_the_order() -> None:
    """The example of Holm (1979): 4 x .01, 3 x .013 raised to .04, 2 x .03, 1 x .04 raised to .06."""
    adjusted = significance.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.013})
    assert adjusted == pytest.approx({"b": 0.04, "d": 0.04, "c": 0.06, "a": 0.06})
    assert significance.holm({"a": 0.7, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@each(
    ("sentence", "answer", "score"),
    [("the star is red", "red", 1), ("Red.", "red", 1), ("stars: red, blue: 2", "2", 1), ("a star: no", "yes", 0),
     ("the star is infrared", "red", 0), ("red it is", "red", 0), ("", "red", 0)],
)  # fmt: skip
def test_a_sentence_is_right_by_its_last_words(sentence: str, answer: str, score: float) -> None:
    assert METRICS["ending"].score([sentence], [[answer]]) == [score]


# -- two methods -----------------------------------------------------------------------------------------------------


def build_answers(*right: str) -> paired.Answers:
    return paired.Answers([[float(score) for score in seed_scores] for seed_scores in right], right)


def test_the_bootstrap_equals_a_loop() -> None:
    values = np.random.default_rng(1).normal(0.1, 1, 60)
    rng = np.random.default_rng(2)
    means = [values[rng.integers(60, size=60)].mean() for _ in range(4000)]
    low, high = paired.bootstrap(values)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.03)
    assert paired.bootstrap(values) == (low, high)  # the seed is fixed
    assert paired.bootstrap(np.array([0.5] * 9)) == (0.5, 0.5)
    assert paired.bootstrap(np.array([0.5])) == (0.5, 0.5)


def test_versus_by_hand() -> None:
    ours, theirs = build_answers("1111110000"), build_answers("1000000000")
    forward = paired.compare_paired(ours, theirs)
    assert forward.difference == pytest.approx(0.5)
    assert forward.p == pytest.approx(2 / 2**5)  # five wins and no loss, two-sided
    assert 0 < forward.low < 0.5 < forward.high <= 1
    back = paired.compare_paired(theirs, ours)
    assert (back.difference, back.p) == (-forward.difference, forward.p)
    assert paired.compare_paired(ours, ours) == paired.PairedDifference(0, 0, 0, 1)
    assert paired.compare_paired(build_answers("1100"), build_answers("0011")).p == 1  # as many wins as losses
    # Three of five in either direction.
    assert paired.compare_paired(build_answers("11100"), build_answers("00011")).p == 1
    # Seeds are averaged before the bootstrap draws questions.
    assert paired.compare_paired(build_answers("10", "01"), build_answers("00")).difference == 0.5
    assert paired.compare_paired(build_answers("10", "01"), build_answers("00")).low == 0.5


def test_without_right_and_wrong_the_interval_decides() -> None:
    low, high = (paired.Answers([values], None, True) for values in ([0.2, 0.4, 0.1] * 5, [0.9, 0.5, 1.4] * 5))
    assert paired.compare_paired(high, low).p is None
    assert (
        paired.is_better_graded(high, low)
        and not paired.is_better_graded(low, high)
        and not paired.is_better_graded(low, low)
    )
    rivals = {("random", 0.25): low}
    assert results.compute_marks("mine", 0.25, high, rivals) == ()
    assert results.compute_marks("mine", 0.25, low, rivals) == ("≤rnd",)


def test_hard_questions_are_those_that_downsample_gets_wrong() -> None:
    stats = {"visual_tokens_in": 1, "visual_tokens_out": 1, "visual_tokens_average": 1.0}

    def record(method: str, keep: float, right: str) -> dict[str, Any]:
        return dict(
            record="result", method=method, keep=keep, site="PRE_LLM", right=[right], questions=6, stats=stats
        )  # fmt: skip

    header = dict(record="header", kinds=["a"], kind_of_question="000000")
    summary = results.summarise([
        header,
        record("unpatched", 1.0, "111101"),
        record("downsample", 0.5, "110000"),
        record("downsample", 0.25, "000000"),
        record("mine", 0.5, "001110"),
        record("mine", 0.1, "111111"),
    ])  # fmt: skip
    rows = {(row.method, row.keep): row for row in summary.rows}
    assert rows["unpatched", 1.0].hard is None and rows["mine", 0.1].hard is None
    hard = rows["mine", 0.5].hard
    assert (hard.questions, hard.ours.value, hard.unpatched) == (4, 0.75, 0.75)
    assert rows["downsample", 0.5].hard.ours.value == 0
    assert rows["downsample", 0.25].hard.questions == 6
    assert set(rows["mine", 0.5].differences) == {"unpatched", "downsample"}
    assert rows["downsample", 0.5].differences.keys() == {"unpatched"}
