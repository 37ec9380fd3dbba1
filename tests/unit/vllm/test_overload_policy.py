# SPDX-License-Identifier: Apache-2.0
"""Overload rules: parsing, the bound on changes, and a simulated server with 10,000 requests."""

from __future__ import annotations

import importlib
import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from each import each
from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.settings.overload import Overload, OverloadState

ROOT = Path(__file__).parents[3]
RULE = Overload((8, 32), ("normal", "fast"))
# compares the load with the steps only
WITHOUT_DELAY = Overload(RULE.steps, RULE.profiles, release=1.0, rise=0.0, dwell=0.0)


def test_from_json() -> None:
    required = {"in_flight": [8, 32], "profiles": ["normal", "fast"]}
    assert Overload.from_json(required, ["normal", "fast"]) == RULE
    assert Overload.from_json(required | {"release": 1, "rise": 0, "dwell": 0}, ["normal", "fast"]) == WITHOUT_DELAY


@each(
    ("changes", "message"),
    [
        ({"release": 0}, r"release in \(0, 1\], as 0.5, not 0"),
        ({"release": 1.1}, "release"),
        ({"release": True}, "release"),
        ({"release": None}, "release"),
        ({"dwell": -1}, "dwell of 0 to 3600 seconds, not -1"),
        ({"dwell": "5"}, "dwell"),
        ({"dwell": 1e9}, "dwell"),
        ({"rise": -0.1}, "rise of 0 to 3600 seconds, not -0.1"),
        ({"rise": [1]}, "rise"),
        ({"hysteresis": 1}, "no more than release, rise, dwell beside them"),
    ],
)
def test_bad_rules_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=f"overload must be .*{message}"):
        Overload.from_json({"in_flight": [8], "profiles": ["fast"]} | changes, ["fast"])


def test_steps_are_left_below_the_release_share() -> None:
    up = [RULE.find_step(in_flight) for in_flight in (0, 7, 8, 31, 32, 10**6)]
    assert up == [0, 0, 1, 1, 2, 2]
    down = [RULE.find_step(in_flight, 2) for in_flight in (40, 32, 31, 16, 15, 8, 4, 3, 0)]
    assert down == [2, 2, 2, 2, 1, 1, 1, 0, 0]
    assert [WITHOUT_DELAY.find_step(in_flight, 2) for in_flight in (32, 31, 8, 7)] == [2, 1, 1, 0]


def test_steps_last_for_the_dwell_time() -> None:
    policy = OverloadState(RULE)
    loads = ((0, 0), (1, 8), (1.9, 40), (2, 40), (6.9, 0), (7, 0), (7.9, 8), (8, 8), (12.9, 3), (13, 4), (13, 3))
    assert [policy.take(in_flight, now) for now, in_flight in loads] == [0, 1, 1, 2, 2, 0, 0, 1, 1, 1, 0]


def test_a_burst_crosses_a_single_step() -> None:
    rule = Overload((4, 12), ("half", "tenth"))
    for overload, expected in ((rule, {0, 1}), (Overload(rule.steps, rule.profiles, 1.0, 0.0, 0.0), {0, 1, 2})):
        policy = OverloadState(overload)
        assert {policy.take(in_flight, in_flight / 240) for in_flight in range(24)} == expected


LOADS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(loads=LOADS, release=st.floats(0.05, 1), dwell=st.floats(0.1, 10))
def test_the_number_of_changes_is_bounded(loads: list[tuple[float, int]], release: float, dwell: float) -> None:
    policy, now, last, downs = OverloadState(Overload((8, 32), ("a", "b"), release, dwell / 5, dwell)), 0.0, -1e9, []
    for wait, in_flight in loads:
        now += wait
        before = policy.step
        if policy.take(in_flight, now) != before:
            assert now - last >= (dwell / 5 if policy.step > before else dwell)
            # A change leads where a bare comparison would, or stays above it.
            assert policy.step >= WITHOUT_DELAY.find_step(in_flight)
            last = now
            downs += [now] * (policy.step < before)
    for start in downs:
        assert sum(start <= time < start + 60 for time in downs) <= 60 / dwell + 1


# -- a simulated server


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
    return importlib.import_module("overload_shapes")


def count_most_per_minute(times: Sequence[float]) -> int:
    return max((sum(start <= time < start + 60 for time in times) for start in times), default=0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["one by one", "in bursts"])
def test_ten_thousand_requests(shapes: Any, kind: str, seed: int) -> None:
    """Changes are rare, waiting times are far below the unpruned server, and the kept share exceeds the strictest
    profile.

    A bare comparison changes many times a minute on the same arrivals.
    """
    times = shapes.arrivals(shapes.ARRIVALS[kind], seed)
    assert len(times) == 10_000 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times[:500])]  # at a constant rate
    assert (statistics.stdev(gaps) > 1.5 * statistics.mean(gaps)) == (kind == "in bursts")
    policy, downs = OverloadState(RULE), []

    def take(in_flight: int, now: float) -> int:
        before = policy.step
        downs.extend([now] * (policy.take(in_flight, now) < before))
        return policy.step

    actual = shapes.simulate(times, take)
    results = {name: shapes.simulate(times, choose) for name, choose in shapes.settings().items()}
    assert actual == results["policy"] and results["whole"]["kept"] == 1
    assert 0 < count_most_per_minute(downs) <= 60 / RULE.dwell + 1
    assert actual["most_within_a_minute"] < results["compared anew"]["most_within_a_minute"] / 3
    assert 0 < actual["changes_a_minute"] < results["compared anew"]["changes_a_minute"] / 2.5
    assert results["quarter"]["p99"] <= actual["p99"] < results["whole"]["p99"] / 3
    assert results["quarter"]["kept"] < actual["kept"] < 1


def test_the_raw_file_equals_a_new_simulation(shapes: Any) -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/overload_shapes.jsonl").read_text().splitlines()]
    assert [(row["arrivals"], row["setting"]) for row in rows] == [
        (kind, setting) for kind in shapes.ARRIVALS for setting in shapes.settings()
    ]
    for row in rows:
        if row["setting"] in ("half", "policy"):
            times = shapes.arrivals(shapes.ARRIVALS[row["arrivals"]], row["seed"])
            result = shapes.simulate(times, shapes.settings()[row["setting"]])
            assert {key: row[key] for key in result} == pytest.approx(result, rel=1e-3)


def test_a_queue_by_hand(shapes: Any) -> None:
    """Nine requests at once on eight lanes of one second each, unpruned. A tenth request finds an empty server."""
    result = shapes.simulate([0.0] * 9 + [70.0], lambda *_: 0)
    assert result == {"p99": 2.0, "kept": 1.0, "changes_a_minute": 0.0, "most_within_a_minute": 0}
    steps = iter([0, 1, 0, 2])
    result = shapes.simulate([0.0, 10.0, 20.0, 120.0], lambda *_: next(steps))
    assert result == {"p99": 1.0, "kept": 0.6875, "changes_a_minute": 1.5, "most_within_a_minute": 2}
