# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/overload.py without a server: arrivals, and queues with known answers."""

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
    counts = [sum(start <= arrival < end for arrival in trace) for start, end in ((0, 100), (100, 150), (150, 250))]
    assert counts[0] == pytest.approx(500, abs=70) and counts[1] == pytest.approx(2000, abs=140) and counts[2] < 8
    # In a Poisson process, a share of exp(-1) of the gaps is above the mean.
    gaps = [b - a for a, b in itertools.pairwise(arrival for arrival in trace if 100 <= arrival < 150)]
    assert sum(gap > 1 / 40 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04)


def test_a_queue_by_hand(overload: Any) -> None:
    """A request takes ten seconds without pruning, and two seconds with the smallest budget."""
    seconds = {"full": 10, "half": 5, "fast": 2}
    rule = overload.steps([1, 3], ["half", "fast"], "full")
    results = overload.simulate([0, 1, 2, 3, 100], rule, seconds)
    assert [(served.profile, served.seconds) for served in results] == [
        ("full", 10), ("half", 14), ("half", 18), ("fast", 19), ("full", 10),
    ]  # fmt: skip
    unpruned = overload.simulate([0, 1, 2, 3, 100], lambda _: "full", seconds)
    assert [served.seconds for served in unpruned] == [10, 19, 28, 37, 10]
    two_lanes = overload.simulate([0, 1, 2, 3, 100], lambda _: "full", seconds, lanes=2)
    assert [served.seconds for served in two_lanes] == [10, 10, 18, 18, 10]
    # The first request ends when the second arrives.
    assert [served.seconds for served in overload.simulate([0, 10], rule, seconds)] == [10, 10]


def test_the_rule_equals_the_server(overload: Any) -> None:
    off = OFF
    config = {"profiles": {"a": {"off": True}, "b": {"off": True}}}
    config["overload"] = {"in_flight": [3, 7], "profiles": ["a", "b"]} | overload.BARE
    offer, rule = (ServerConfig.from_json(config, off, parse_setting), overload.steps([3, 7], ["a", "b"], "default"))
    policy, names, loads = OverloadState(offer.overload), ["default", "a", "b"], [*range(20), *range(20, -1, -1)]
    assert [rule(in_flight) for in_flight in loads] == [names[policy.take(in_flight, 0.0)] for in_flight in loads]


def test_under_load_the_policy_is_as_fast_as_the_least(overload: Any) -> None:
    seconds = {"full": 0.1, "fast": 0.02}
    rule = overload.steps([4], ["fast"], "full")
    for seed in range(5):
        busy = overload.arrivals([(60, 20)], seed)  # twice the load that the server can answer without pruning
        by_rule = overload.row("rule", overload.simulate(busy, rule, seconds))
        unpruned = overload.row("full", overload.simulate(busy, lambda _: "full", seconds))
        assert by_rule["ttft_p99"] < 1 < 10 < unpruned["ttft_p99"]
        calm = overload.row("rule", overload.simulate(overload.arrivals([(60, 2)], seed), rule, seconds))
        assert calm["profiles"].get("full", 0) > 0.95


def test_a_row_is_summed_up(overload: Any) -> None:
    served = [overload.Served("a", index / 10, index % 2 == 0) for index in range(1, 101)]
    assert overload.row("x", served) == {
        "setting": "x", "requests": 100, "ttft_p50": 5.0, "ttft_p99": 9.9, "right": 0.5, "profiles": {"a": 1.0},
    }  # fmt: skip
    assert overload.percentile([3.0], 0.99) == 3.0 and overload.percentile([1.0, 2.0], 0.5) == 1.0
