# SPDX-License-Identifier: Apache-2.0
"""The policy under load: what it reads, its bound on changes, and a simulated server with 10,000 requests."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenprune.errors import OptionError
from tokenprune.integrations.vllm.setting.overload import Overload, Policy

RULE = Overload((8, 32), ("normal", "fast"))
FLUTTERS = Overload(RULE.steps, RULE.profiles, release=1.0, rise=0.0, dwell=0.0)  # a bare comparison


def test_what_is_read() -> None:
    least = {"in_flight": [8, 32], "profiles": ["normal", "fast"]}
    assert Overload.of(least, ["normal", "fast"]) == RULE
    assert Overload.of(least | {"release": 1, "rise": 0, "dwell": 0}, ["normal", "fast"]) == FLUTTERS


@pytest.mark.parametrize(
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
        Overload.of({"in_flight": [8], "profiles": ["fast"]} | more, ["fast"])


def test_a_step_is_left_well_below_its_number() -> None:
    up = [RULE.wanted(number) for number in (0, 7, 8, 31, 32, 10**6)]
    assert up == [0, 0, 1, 1, 2, 2]
    down = [RULE.wanted(number, 2) for number in (40, 32, 31, 16, 15, 8, 4, 3, 0)]
    assert down == [2, 2, 2, 2, 1, 1, 1, 0, 0]
    assert [FLUTTERS.wanted(number, 2) for number in (32, 31, 8, 7)] == [2, 1, 1, 0]


def test_a_step_is_in_force_for_a_while() -> None:
    policy = Policy(RULE)
    loads = ((0, 0), (1, 8), (1.9, 40), (2, 40), (6.9, 0), (7, 0), (7.9, 8), (8, 8), (12.9, 3), (13, 4), (13, 3))
    assert [policy.take(number, at) for at, number in loads] == [0, 1, 1, 2, 2, 0, 0, 1, 1, 1, 0]


def test_a_burst_gets_two_qualities() -> None:
    """24 requests within a tenth of a second, as they were once served in three."""
    rule = Overload((4, 12), ("half", "tenth"))
    for one, found in ((rule, {0, 1}), (Overload(rule.steps, rule.profiles, 1.0, 0.0, 0.0), {0, 1, 2})):
        policy = Policy(one)
        assert {policy.take(number, number / 240) for number in range(24)} == found


LOADS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 60)), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(loads=LOADS, release=st.floats(0.05, 1), dwell=st.floats(0.1, 10))
def test_no_load_makes_it_change_more_often(loads: list[tuple[float, int]], release: float, dwell: float) -> None:
    policy, now, last, downs = Policy(Overload((8, 32), ("a", "b"), release, dwell / 5, dwell)), 0.0, -1e9, []
    for wait, in_flight in loads:
        now += wait
        before = policy.step
        if policy.take(in_flight, now) != before:
            assert now - last >= (dwell / 5 if policy.step > before else dwell)
            # A change leads where a bare comparison would, or stays above it.
            assert policy.step >= FLUTTERS.wanted(in_flight)
            last = now
            downs += [now] * (policy.step < before)
    for start in downs:
        assert sum(start <= one < start + 60 for one in downs) <= 60 / dwell + 1


# -- a server, simulated

NUMBER, LANES = 10_000, 8
SECONDS = {0: 1.0, 1: 0.5, 2: 0.3}  # that a request of each step occupies a lane
KEEP = {0: 1.0, 1: 0.5, 2: 0.25}


def poisson(draw: random.Random, rate: float) -> Iterator[float]:
    while True:
        yield draw.expovariate(rate)


def gamma(draw: random.Random, rate: float, shape: float = 0.2) -> Iterator[float]:
    """Gaps of the same mean that come in bursts: their coefficient of variation is 1 / sqrt(shape), 2.2 here."""
    while True:
        yield draw.gammavariate(shape, 1 / (rate * shape))


def arrivals(kind: Any, seed: int) -> list[float]:
    """Times of 10,000 requests: in turn as many as the server answers in full (8 a second), a third more, and less."""
    draw, now, made = random.Random(seed), 0.0, []
    rates = [kind(draw, rate) for rate in (6.0, 8.0, 10.7, 8.0)]
    for index in range(NUMBER):
        now += next(rates[index // 500 % len(rates)])
        made.append(now)
    return made


def simulate(times: Sequence[float], choose: Any) -> tuple[float, float, list[float]]:
    """Return the 99th percentile of the seconds to an answer, the mean share kept, and when the step changed, below 0
    where it went down; first come, first served."""
    free, running, waits, kept, changes, before = [0.0] * LANES, [], [], 0.0, [], 0
    for at in times:
        while running and running[0] <= at:
            heapq.heappop(running)
        step = choose(len(running), at)
        if step != before:
            changes.append(at if step > before else -at)
            before = step
        done = max(at, heapq.heappop(free)) + SECONDS[step]
        heapq.heappush(free, done)
        heapq.heappush(running, done)
        waits.append(done - at)
        kept += KEEP[step]
    return sorted(waits)[int(0.99 * len(waits))], kept / len(times), changes


def most_a_minute(times: Sequence[float]) -> int:
    """The most changes within any 60 seconds."""
    changes = sorted(map(abs, times))
    return max((sum(start <= one < start + 60 for one in changes) for start in changes), default=0)


@pytest.mark.parametrize("kind", [poisson, gamma])
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_thousand_requests(kind: Any, seed: int) -> None:
    """Flips are bounded and few, waits far below those of whole images, and more is kept than under the strictest
    profile. A bare comparison flips many times a minute on the same arrivals."""
    times = arrivals(kind, seed)
    assert len(times) == NUMBER
    policy, bare = Policy(RULE), Policy(FLUTTERS)
    p99, kept, changes = simulate(times, policy.take)
    slow, _, _ = simulate(times, lambda *_: 0)
    quick, least, _ = simulate(times, lambda *_: 2)
    _, _, flutters = simulate(times, bare.take)
    downs = [one for one in changes if one < 0]
    assert 0 < most_a_minute(downs) <= 60 / RULE.dwell + 1 < most_a_minute([one for one in flutters if one < 0])
    assert most_a_minute(changes) < most_a_minute(flutters) / 3 and len(changes) < len(flutters) / 2.5
    assert quick <= p99 < slow / 3 and least < kept < 1
