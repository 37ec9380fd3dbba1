# SPDX-License-Identifier: Apache-2.0
"""benchmarks/mixed_load.py without a server: which requests it draws, and what it calls a difference."""

from __future__ import annotations

import asyncio
import collections
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.setting.offer import Offer, split
from tokenprune.integrations.vllm.setting.settings import ServedSetting


@pytest.fixture(scope="module")
def load() -> Any:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("mixed_load")
    finally:
        sys.path.remove(folder)


def test_requests_are_of_all_kinds(load: Any) -> None:
    made = load.draw(200, 0, ["what?", "where?"], 12)
    assert made == load.draw(200, 0, ["what?", "where?"], 12) != load.draw(200, 1, ["what?", "where?"], 12)
    kinds = collections.Counter(one.kind for one in made)
    assert set(kinds) == set(load.KINDS) and min(kinds.values()) >= 5
    assert {one.leaves for one in made} == {None, 0, 1, 2} and {len(one.images) for one in made} == {1, 2}
    assert {one.profile for one in made if one.kind == "name"} == set(load.PROFILES)
    images = collections.Counter(number for one in made for number in one.images)
    assert set(images) <= set(range(12)) and images[0] > 50  # the same one again and again
    assert all((one.asked is not None or one.kind == "wrong") == one.has_asked for one in made)


def test_right_and_wrong_are_what_they_are_called(load: Any) -> None:
    base, given = split(load.SERVER)
    offer = Offer.of(given, ServedSetting.of(base), lambda profile: ServedSetting.of(base, profile))
    for asked in [*load.OWN, *({"profile": one} for one in load.PROFILES)]:
        offer.setting(asked)
    for asked in load.WRONG:
        with pytest.raises(TokenPruneError):
            offer.setting(asked)


def test_a_difference_is_seen(load: Any) -> None:
    one = load.Answer(200, (5, 7), {(0, 5): -0.1, (1, 7): -0.2})
    assert load.differences(one, one) == [] == load.differences(load.Answer(400), load.Answer(400))
    assert load.differences(one, load.Answer(200, (5, 7), {(0, 5): -0.10005, (1, 8): -9.0})) == []
    assert load.differences(one, load.Answer(400)) == ["status 200, alone 400"]
    assert "tokens" in load.differences(one, load.Answer(200, (5, 8)))[0]
    assert load.differences(one, load.Answer(200, (5, 7), {(1, 7): -0.3})) == ["log-probabilities 1.0e-01 apart"]


def test_a_request_is_sent_again_once(load: Any) -> None:
    """Where the server failed by itself; what is wrong with a request is not tried twice."""

    def asked(*statuses: int) -> tuple[Any, int]:
        left = list(statuses)

        async def once(request: Any) -> Any:
            return load.Answer(left.pop(0))

        client = object.__new__(load.Client)
        client._once = once
        return asyncio.run(client.ask(None)), len(left)

    assert asked(200, 0) == (load.Answer(200), 1) and asked(400, 0) == (load.Answer(400), 1)
    assert asked(500, 200, 0) == (load.Answer(200, again=True), 1)
    assert asked(500, 500, 0) == (load.Answer(500, again=True), 1)
