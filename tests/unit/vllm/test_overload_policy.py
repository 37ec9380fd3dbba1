# SPDX-License-Identifier: Apache-2.0
"""The policy under load: what it reads, its bound on changes, and a simulated server with 10,000 requests."""

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
FLUTTERS = Overload(RULE.steps, RULE.profiles, release=1.0, rise=0.0, dwell=0.0)  # a bare comparison


def test_what_is_read() -> None:
    least = {"in_flight": [8, 32], "profiles": ["normal", "fast"]}
    assert Overload.from_json(least, ["normal", "fast"]) == RULE
    assert Overload.from_json(least | {"release": 1, "rise": 0, "dwell": 0}, ["normal", "fast"]) == FLUTTERS


@each(
    ("more", "says"),
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
def test_what_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=f"overload must be .*{says}"):
        Overload.from_json({"in_flight": [8], "profiles": ["fast"]} | more, ["fast"])


def test_a_step_is_left_well_below_its_number() -> None:
    up = [RULE.find_step(number) for number in (0, 7, 8, 31, 32, 10**6)]
    assert up == [0, 0, 1, 1, 2, 2]
    down = [RULE.find_step(number, 2) for number in (40, 32, 31, 16, 15, 8, 4, 3, 0)]
    assert down == [2, 2, 2, 2, 1, 1, 1, 0, 0]
    assert [FLUTTERS.find_step(number, 2) for number in (32, 31, 8, 7)] == [2, 1, 1, 0]


def test_a_step_is_in_force_for_a_while() -> None:
    policy = OverloadState(RULE)
    loads = ((0, 0), (1, 8), (1.9, 40), (2, 40), (6.9, 0), (7, 0), (7.9, 8), (8, 8), (12.9, 3), (13, 4), (13, 3))
    assert [policy.take(number, at) for at, number in loads] == [0, 1, 1, 2, 2, 0, 0, 1, 1, 1, 0]


def test_a_burst_gets_two_qualities() -> None:
    rule = Overload((4, 12), ("half", "tenth"))
    for one, found in ((rule, {0, 1}), (Overload(rule.steps, rule.profiles, 1.0, 0.0, 0.0), {0, 1, 2})):
        policy = OverloadState(one)
        assert {policy.take(number, number / 240) for number in range(24)} == found


LOADS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(loads=LOADS, release=st.floats(0.05, 1), dwell=st.floats(0.1, 10))
def test_no_load_makes_it_change_more_often(loads: list[tuple[float, int]], release: float, dwell: float) -> None:
    policy, now, last, downs = OverloadState(Overload((8, 32), ("a", "b"), release, dwell / 5, dwell)), 0.0, -1e9, []
    for wait, in_flight in loads:
        now += wait
        before = policy.step
        if policy.take(in_flight, now) != before:
            assert now - last >= (dwell / 5 if policy.step > before else dwell)
            # A change leads where a bare comparison would, or stays above it.
            assert policy.step >= FLUTTERS.find_step(in_flight)
            last = now
            downs += [now] * (policy.step < before)
    for start in downs:
        assert sum(start <= one < start + 60 for one in downs) <= 60 / dwell + 1


# -- a server, simulated


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "experiments"))
    return importlib.import_module("overload_shapes")


def most_a_minute(times: Sequence[float]) -> int:
    return max((sum(start <= one < start + 60 for one in times) for start in times), default=0)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["one by one", "in bursts"])
def test_ten_thousand_requests(shapes: Any, kind: str, seed: int) -> None:
    """Changes are bounded and few, waits far below those of whole images, and more is kept than by the strictest
    profile. A bare comparison changes many times a minute on the same arrivals."""
    times = shapes.arrivals(shapes.ARRIVALS[kind], seed)
    assert len(times) == 10_000 and times == sorted(times)
    gaps = [b - a for a, b in itertools.pairwise(times[:500])]  # at one rate
    assert (statistics.stdev(gaps) > 1.5 * statistics.mean(gaps)) == (kind == "in bursts")
    policy, downs = OverloadState(RULE), []

    def take(in_flight: int, now: float) -> int:
        before = policy.step
        downs.extend([now] * (policy.take(in_flight, now) < before))
        return policy.step

    ours = shapes.simulate(times, take)
    by = {name: shapes.simulate(times, choose) for name, choose in shapes.settings().items()}
    assert ours == by["policy"] and by["whole"]["kept"] == 1
    assert 0 < most_a_minute(downs) <= 60 / RULE.dwell + 1
    assert ours["most_within_a_minute"] < by["compared anew"]["most_within_a_minute"] / 3
    assert 0 < ours["changes_a_minute"] < by["compared anew"]["changes_a_minute"] / 2.5
    assert by["quarter"]["p99"] <= ours["p99"] < by["whole"]["p99"] / 3
    assert by["quarter"]["kept"] < ours["kept"] < 1


def test_the_raw_file_is_what_the_script_draws(shapes: Any) -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/overload_shapes.jsonl").read_text().splitlines()]
    assert [(one["arrivals"], one["setting"]) for one in rows] == [
        (kind, setting) for kind in shapes.ARRIVALS for setting in shapes.settings()
    ]
    for row in rows:
        if row["setting"] in ("half", "policy"):
            times = shapes.arrivals(shapes.ARRIVALS[row["arrivals"]], row["seed"])
            found = shapes.simulate(times, shapes.settings()[row["setting"]])
            assert {key: row[key] for key in found} == pytest.approx(found, rel=1e-3)


def test_a_queue_by_hand(shapes: Any) -> None:
    """Nine requests at once on eight lanes of a second each, in full; and a tenth that finds nobody."""
    found = shapes.simulate([0.0] * 9 + [70.0], lambda *_: 0)
    assert found == {"p99": 2.0, "kept": 1.0, "changes_a_minute": 0.0, "most_within_a_minute": 0}
    steps = iter([0, 1, 0, 2])
    found = shapes.simulate([0.0, 10.0, 20.0, 120.0], lambda *_: next(steps))
    assert found == {"p99": 1.0, "kept": 0.6875, "changes_a_minute": 1.5, "most_within_a_minute": 2}
