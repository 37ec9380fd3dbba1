# SPDX-License-Identifier: Apache-2.0
"""What the tuner promises: the test behind it, and how drops are asked for."""

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


@each("level", [0.05, 0.2])
@each("limit", [-0.02, 0.02, 0.1])
def test_the_p_value_is_that_of_a_naive_loop(limit: float, level: float) -> None:
    rng = np.random.default_rng(0)
    for draw in (rng.choice([-1.0, 0.0, 1.0], p=[0.02, 0.95, 0.03], size=300), rng.uniform(-0.3, 0.2, size=200)):
        assert betting.compute_p_value(draw, limit, level) == pytest.approx(naive_p_value(draw, limit, level), rel=1e-9)


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
        needed = betting.count_questions_needed(limit, level)
        assert betting.is_below(np.zeros(needed), limit, level)
        assert not betting.is_below(np.zeros(needed - 1), limit, level)
        assert math.log(1 / level) / limit < needed < 1.6 * math.log(1 / level) / limit
    assert betting.compute_p_value(np.zeros(0), 0.1, 0.05) == 1


def test_the_bound_is_where_the_test_begins_to_pass() -> None:
    drops = np.random.default_rng(2).choice([1.0, -1.0, 0.0], p=[0.05, 0.02, 0.93], size=300)
    bound = betting.compute_upper_bound(drops, 0.05, step=0.01)
    assert drops.mean() < bound < 0.12
    assert betting.is_below(drops, bound, 0.05) and not betting.is_below(drops, bound - 0.01, 0.05)
    assert betting.compute_upper_bound(np.ones(50), 0.05) == 1


# -- what is asked for -------------------------------------------------------------------------------------------------


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
    for name, bad in (
        ("max_drop", 0),
        ("max_kind_drop", 1.5),
        ("confidence", 1.0),
        ("confidence", 0.2),
        ("target_ttft", "2"),
    ):
        with pytest.raises(OptionError):
            Promise(**{name: bad})
    assert Promise(target_ttft="0.5x").is_reached({"ttft_ratio": {"p50": 0.5}})
    assert not Promise(target_ttft="0.5x").is_reached({"ttft_ratio": {"p50": 0.51}})
    assert Promise(target_ttft="120ms").is_reached({"ttft_ms": {"p50": 119.0}})
    points = [format_points(share) for share in (0.01, 0.015, 0.1, 0.0233)]
    assert points == ["1 point", "1.5 points", "10 points", "2.33 points"]


def test_too_few_questions_are_said_before_any_work() -> None:
    with pytest.raises(OptionError, match=r"1 point at a confidence of 95 %: 66 .* held out, but at least 391 .* 587"):
        check_question_count(100, Promise(0.01))
    check_question_count(587, Promise(0.01))
    with pytest.raises(OptionError, match="too few"):
        Tuner(Fake(60, {}), [], Promise(0.05))
