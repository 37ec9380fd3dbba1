# SPDX-License-Identifier: Apache-2.0
"""benchmarks/experiments/overload.py without a server: arrivals, and a queue whose answers are known."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tokenprune.integrations.vllm.settings.items import OFF
from tokenprune.integrations.vllm.settings.overload import OverloadState
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import ServerConfig


@pytest.fixture(scope="module")
def overload(script: Any) -> Any:
    return script("overload")


def test_requests_come_as_often_as_asked(overload: Any) -> None:
    trace = overload.arrivals([(100, 5), (50, 40), (100, 0.01)], seed=0)
    assert trace == sorted(trace) == overload.arrivals([(100, 5), (50, 40), (100, 0.01)], seed=0)
    assert trace != overload.arrivals([(100, 5), (50, 40), (100, 0.01)], seed=1)
    counts = [sum(start <= at < end for at in trace) for start, end in ((0, 100), (100, 150), (150, 250))]
    assert counts[0] == pytest.approx(500, abs=70) and counts[1] == pytest.approx(2000, abs=140) and counts[2] < 8
    # Of a Poisson process as many gaps are above the mean as exp(-1) says.
    gaps = [b - a for a, b in itertools.pairwise(one for one in trace if 100 <= one < 150)]
    assert sum(gap > 1 / 40 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)


def test_a_queue_by_hand(overload: Any) -> None:
    """Ten seconds for a request that keeps all, two for one that keeps little."""
    seconds = {"full": 10, "half": 5, "fast": 2}
    rule = overload.steps([1, 3], ["half", "fast"], "full")
    out = overload.simulate([0, 1, 2, 3, 100], rule, seconds)
    assert [(one.profile, one.seconds) for one in out] == [
        ("full", 10), ("half", 14), ("half", 18), ("fast", 19), ("full", 10),
    ]  # fmt: skip
    fixed = overload.simulate([0, 1, 2, 3, 100], lambda _: "full", seconds)
    assert [one.seconds for one in fixed] == [10, 19, 28, 37, 10]
    two = overload.simulate([0, 1, 2, 3, 100], lambda _: "full", seconds, lanes=2)
    assert [one.seconds for one in two] == [10, 10, 18, 18, 10]
    assert [one.seconds for one in overload.simulate([0, 10], rule, seconds)] == [10, 10]  # it ended as the next came


def test_the_rule_is_the_servers(overload: Any) -> None:
    off = OFF
    given = {"profiles": {"a": {"off": True}, "b": {"off": True}}}
    given["overload"] = {"in_flight": [3, 7], "profiles": ["a", "b"]} | overload.BARE
    offer, rule = (ServerConfig.from_json(given, off, parse_setting), overload.steps([3, 7], ["a", "b"], "default"))
    policy, names, loads = OverloadState(offer.overload), ["default", "a", "b"], [*range(20), *range(20, -1, -1)]
    assert [rule(number) for number in loads] == [names[policy.take(number, 0.0)] for number in loads]


def test_under_load_the_policy_is_as_fast_as_the_least(overload: Any) -> None:
    seconds = {"full": 0.1, "fast": 0.02}
    rule = overload.steps([4], ["fast"], "full")
    for seed in range(5):
        busy = overload.arrivals([(60, 20)], seed)  # twice what can be answered in full
        by_rule = overload.row("rule", overload.simulate(busy, rule, seconds))
        full = overload.row("full", overload.simulate(busy, lambda _: "full", seconds))
        assert by_rule["ttft_p99"] < 1 < 10 < full["ttft_p99"]
        calm = overload.row("rule", overload.simulate(overload.arrivals([(60, 2)], seed), rule, seconds))
        assert calm["profiles"].get("full", 0) > 0.95


def test_a_row_is_summed_up(overload: Any) -> None:
    served = [overload.Served("a", number / 10, number % 2 == 0) for number in range(1, 101)]
    assert overload.row("x", served) == {
        "setting": "x", "requests": 100, "ttft_p50": 5.0, "ttft_p99": 9.9, "right": 0.5, "profiles": {"a": 1.0},
    }  # fmt: skip
    assert overload.percentile([3.0], 0.99) == 3.0 and overload.percentile([1.0, 2.0], 0.5) == 1.0
