# SPDX-License-Identifier: Apache-2.0
"""Comparisons of two methods: the bootstrap, right and wrong answers, hard questions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenprune_bench import paired, results


def answers(*right: str) -> paired.Answers:
    return paired.Answers([[float(one) for one in each] for each in right], right)


def test_the_bootstrap_is_that_of_a_loop() -> None:
    values = np.random.default_rng(1).normal(0.1, 1, 60)
    rng = np.random.default_rng(2)
    means = [values[rng.integers(60, size=60)].mean() for _ in range(4000)]
    low, high = paired.bootstrap(values)
    assert (low, high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.03)
    assert paired.bootstrap(values) == (low, high)  # the seed is fixed
    assert paired.bootstrap(np.array([0.5] * 9)) == (0.5, 0.5)
    assert paired.bootstrap(np.array([0.5])) == (0.5, 0.5)


def test_versus_by_hand() -> None:
    ours, theirs = answers("1111110000"), answers("1000000000")
    found = paired.compare_paired(ours, theirs)
    assert found.difference == pytest.approx(0.5)
    assert found.p == pytest.approx(2 / 2**5)  # five wins, no loss, two-sided
    assert 0 < found.low < 0.5 < found.high <= 1
    back = paired.compare_paired(theirs, ours)
    assert (back.difference, back.p) == (-found.difference, found.p)
    assert paired.compare_paired(ours, ours) == paired.PairedDifference(0, 0, 0, 1)
    assert paired.compare_paired(answers("1100"), answers("0011")).p == 1  # as many wins as losses
    assert paired.compare_paired(answers("11100"), answers("00011")).p == 1  # three of five, either way
    # Seeds are averaged before questions are drawn.
    assert paired.compare_paired(answers("10", "01"), answers("00")).difference == 0.5
    assert paired.compare_paired(answers("10", "01"), answers("00")).low == 0.5


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
    made = results.summarise([
        header,
        record("unpatched", 1.0, "111101"),
        record("downsample", 0.5, "110000"),
        record("downsample", 0.25, "000000"),
        record("mine", 0.5, "001110"),
        record("mine", 0.1, "111111"),
    ])  # fmt: skip
    rows = {(row.method, row.keep): row for row in made.rows}
    assert rows["unpatched", 1.0].hard is None and rows["mine", 0.1].hard is None
    hard = rows["mine", 0.5].hard
    assert (hard.questions, hard.ours.value, hard.unpatched) == (4, 0.75, 0.75)
    assert rows["downsample", 0.5].hard.ours.value == 0
    assert rows["downsample", 0.25].hard.questions == 6
    assert set(rows["mine", 0.5].differences) == {"unpatched", "downsample"}
    assert rows["downsample", 0.5].differences.keys() == {"unpatched"}
