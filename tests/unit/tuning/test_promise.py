# SPDX-License-Identifier: Apache-2.0
"""The tuner's promise: the statistical test, and the syntax of drops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from each import each
from made_up_panels import Fake
from tokenprune.errors import OptionError
from tokenprune_bench.tuning import Promise, Tuner, betting
from tokenprune_bench.tuning.promise import format_points, read_share
from tokenprune_bench.tuning.question_split import check_question_count

# -- the statistical test --------------------------------------------------------------------------------------------


def naive_p_value(drops: Sequence[float], limit: float, level: float) -> float:
    """Compute the p-value question by question, as its docstring describes."""
    wealth = max_wealth = 1.0
    values = [0.0, 1.0, 0.0, 1.0]  # imagined values with mean 1/2 and variance 1/4
    for index, drop in enumerate(drops):
        value, fair = (1 - drop) / 2, (1 - limit) / 2
        if max_wealth >= (1 - 1e-9) / level:
            break
        mean = sum(values) / len(values)
        variance = sum(x * x for x in values) / len(values) - mean**2
        needed = max(0.0, math.log(1 / level) - math.log(wealth))
        bet = min(math.sqrt(2 * needed / (variance * (len(drops) - index))), 0.9 / fair)
        wealth *= 1 + bet * (value - fair)
        max_wealth = max(max_wealth, wealth)
        values.append(value)
    return 1 / max_wealth


@each("level", [0.05, 0.2])
@each("limit", [-0.02, 0.02, 0.1])
def test_p_values_equal_a_naive_loop(limit: float, level: float) -> None:
    rng = np.random.default_rng(0)
    for draw in (rng.choice([-1.0, 0.0, 1.0], p=[0.02, 0.95, 0.03], size=300), rng.uniform(-0.3, 0.2, size=200)):
        assert betting.compute_p_value(draw, limit, level) == pytest.approx(naive_p_value(draw, limit, level), rel=1e-9)


@pytest.mark.parametrize(("lost", "won"), [(0.1, 0.0), (0.3, 0.2), (0.5, 0.4)])
def test_it_is_wrong_no_more_often_than_it_says(lost: float, won: float) -> None:
    """The true drop equals the limit. A bet that depends on its own question would fail here."""
    rng, runs, level = np.random.default_rng(1), 600, 0.1
    draws = rng.choice([1.0, -1.0, 0.0], p=[lost, won, 1 - lost - won], size=(runs, 80))
    num_wrong = sum(betting.is_below(draw, 0.1, level) for draw in draws) / runs
    assert num_wrong <= level + 3 * math.sqrt(level * (1 - level) / runs)
    # The test has power: with few changed answers, most runs show a drop below half of the limit.
    if won == 0:
        small_drops = rng.choice([1.0, 0.0], p=[0.03, 0.97], size=(100, 100))
        assert sum(betting.is_below(draw, 0.1, level) for draw in small_drops) > 60


def test_a_few_unchanged_answers_do_not_pass() -> None:
    """A bootstrap interval has zero width here."""
    for limit, level in ((0.1, 0.05), (0.1, 0.1), (0.3, 0.05)):
        needed = betting.count_questions_needed(limit, level)
        assert betting.is_below(np.zeros(needed), limit, level)
        assert not betting.is_below(np.zeros(needed - 1), limit, level)
        assert math.log(1 / level) / limit < needed < 1.6 * math.log(1 / level) / limit
    assert betting.compute_p_value(np.zeros(0), 0.1, 0.05) == 1


def test_the_upper_bound_is_the_smallest_limit_that_passes() -> None:
    drops = np.random.default_rng(2).choice([1.0, -1.0, 0.0], p=[0.05, 0.02, 0.93], size=300)
    bound = betting.compute_upper_bound(drops, 0.05, step=0.01)
    assert drops.mean() < bound < 0.12
    assert betting.is_below(drops, bound, 0.05) and not betting.is_below(drops, bound - 0.01, 0.05)
    assert betting.compute_upper_bound(np.ones(50), 0.05) == 1


# -- the syntax of drops ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.5 %", 0.005), ("2pt", 0.02), ("3 pts", 0.03), (".02", 0.02)]
)
def test_drops_are_read(text: str, share: float) -> None:
    assert read_share(text) == pytest.approx(share)


@each("text", ["1", "0", "100%", "-1%", "one", "", "1%%", "2"])
def test_bad_drops_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"1%, 1pt and 0\.01 all mean one point"):
        read_share(text)


def test_bad_promises_are_refused() -> None:
    for name, value in (
        ("max_drop", 0),
        ("max_kind_drop", 1.5),
        ("confidence", 1.0),
        ("confidence", 0.2),
        ("target_ttft", "2"),
    ):
        with pytest.raises(OptionError):
            Promise(**{name: value})
    assert Promise(target_ttft="0.5x").is_reached({"ttft_ratio": {"p50": 0.5}})
    assert not Promise(target_ttft="0.5x").is_reached({"ttft_ratio": {"p50": 0.51}})
    assert Promise(target_ttft="120ms").is_reached({"ttft_ms": {"p50": 119.0}})
    points = [format_points(share) for share in (0.01, 0.015, 0.1, 0.0233)]
    assert points == ["1 point", "1.5 points", "10 points", "2.33 points"]


def test_too_few_questions_are_refused_before_any_work() -> None:
    with pytest.raises(OptionError, match=r"1 point at a confidence of 95 %: 66 .* held out, but at least 391 .* 587"):
        check_question_count(100, Promise(0.01))
    check_question_count(587, Promise(0.01))
    with pytest.raises(OptionError, match="too few"):
        Tuner(Fake(60, {}), [], Promise(0.05))
