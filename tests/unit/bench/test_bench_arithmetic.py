# SPDX-License-Identifier: Apache-2.0
"""The benchmark's intervals, tests and quantiles by hand."""

from __future__ import annotations

import pytest

from each import each
from tokenprune_bench import significance
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
        ("11111", "00000", 1 / 32),  # five wins, no loss: (1/2)^5
        ("1110", "0001", 5 / 16),  # three wins, one loss: P(X >= 3 of 4)
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
    """The example of Holm (1979), worked by hand: 4 x .01, 3 x .013 raised to it, 2 x .03, 1 x .04 raised to it."""
    found = significance.holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.013})
    assert found == pytest.approx({"b": 0.04, "d": 0.04, "c": 0.06, "a": 0.06})
    assert significance.holm({"a": 0.7, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@each(
    ("said", "answer", "score"),
    [("the star is red", "red", 1), ("Red.", "red", 1), ("stars: red, blue: 2", "2", 1), ("a star: no", "yes", 0),
     ("the star is infrared", "red", 0), ("red it is", "red", 0), ("", "red", 0)],
)  # fmt: skip
def test_a_sentence_is_right_by_its_last_words(said: str, answer: str, score: float) -> None:
    assert METRICS["ending"].score([said], [[answer]]) == [score]
