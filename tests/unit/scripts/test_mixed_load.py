# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/mixed_load.py without a server: the requests that it draws, and the differences that it
reports."""

from __future__ import annotations

import asyncio
import collections
import itertools
from typing import Any

import pytest

from tokenprune.errors import TokenPruneError
from tokenprune.integrations.vllm.settings.configuration import split_server_keys
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.server_config import ServerConfig

SERVED = "uniform;keep=0.11;profile=fast;by=name;in=16;out=2"


@pytest.fixture(scope="module")
def load(script: Any) -> Any:
    return script("mixed_requests")


@pytest.fixture(scope="module")
def checks(script: Any) -> Any:
    return script("mixed_checks")


def draw_requests(load: Any, seed: int) -> list[Any]:
    return list(itertools.islice(load.draw(seed, ["what?", "where?"], 12), 200))


def test_requests_are_of_all_kinds(load: Any) -> None:
    items = draw_requests(load, 0)
    assert items == draw_requests(load, 0) != draw_requests(load, 1)
    kinds = collections.Counter(item.kind for item in items)
    assert set(kinds) == set(load.KINDS) and min(kinds.values()) >= 5
    assert {item.leaves for item in items} == {None, 0, 1, 2} and {len(item.images) for item in items} == {1, 2}
    assert {item.profile for item in items if item.kind == "name"} == set(load.PROFILES)
    images = collections.Counter(image_index for item in items for image_index in item.images)
    assert set(images) <= set(range(12)) and images[0] > 50  # the first image is repeated often
    assert all((item.asked is not None or item.kind == "wrong") == item.has_asked for item in items)


def read_server_config(setting: dict[str, Any]) -> ServerConfig:
    base, own_keys = split_server_keys(setting)
    server = parse_setting(base)
    return ServerConfig.from_json(own_keys, server, lambda profile: parse_setting(base, profile))


def test_right_settings_are_accepted_and_wrong_settings_raise(load: Any, checks: Any) -> None:
    config = read_server_config(checks.BASE | checks.OFFERS[0] | checks.LIMITS)
    for setting in [*load.OWN, *({"profile": profile} for profile in load.PROFILES)]:
        config.setting(setting)
    for setting in load.WRONG:
        with pytest.raises(TokenPruneError):
            config.setting(setting)


def test_offers_are_valid_except_the_wrong_offers(checks: Any) -> None:
    for index, offer in enumerate(checks.OFFERS):
        if index in checks.WRONG_OFFERS:
            with pytest.raises(TokenPruneError):
                read_server_config(checks.BASE | offer | checks.LIMITS)
        else:
            read_server_config(checks.BASE | offer | checks.LIMITS)


def test_differences_of_answers_are_detected(load: Any) -> None:
    answer = load.Answer(200, (5, 7), {(0, 5): -0.1, (1, 7): -0.2})
    assert load.differences(answer, answer) == [] == load.differences(load.Answer(400), load.Answer(400))
    assert load.differences(answer, load.Answer(200, (5, 7), {(0, 5): -0.10005, (1, 8): -9.0})) == []
    assert load.differences(answer, load.Answer(400)) == ["status 200, expected 400"]
    assert "tokens" in load.differences(answer, load.Answer(200, (5, 8)))[0]
    assert load.differences(answer, load.Answer(200, (5, 7), {(1, 7): -0.3})) == ["log-probabilities differ by 1.0e-01"]


def test_a_single_request_uses_the_setting_that_served_it(load: Any) -> None:
    named = load.Request("name", (0,), "what?", "fast")
    assert load.alone(named, load.Answer(200, served=SERVED)) == load.Request(
        "setting", (0,), "what?", None, {"method": "uniform", "keep": 0.11}, True
    )
    off = load.Answer(200, served="off;keep=1.0;profile=ocr;by=key;in=16;out=16")
    assert load.alone(load.Request("profile", (0,), "what?", None, {"profile": "ocr"}, True), off).asked == {
        "off": True
    }
    own_setting = load.Request("setting", (0,), "what?", None, {"method": "random", "seed": 3}, True)
    assert load.alone(own_setting, load.Answer(200, served=SERVED)) is own_setting
    assert load.alone(named, load.Answer(400)) is named


def test_a_setting_outside_of_its_offer_is_detected(load: Any, checks: Any) -> None:
    times = [checks.InForce(0, 0, 11), checks.InForce(1, 10, 20), checks.InForce(3, 19)]

    def check(kind: str, begin: float, served: str, profile: str | None = None) -> str | None:
        request = load.Request(kind, (0,), "what?", profile)
        answer = load.Answer(200 if served else 400, served=served)
        return checks.out_of_force(checks.Sent(request, begin, begin + 0.5, answer), times)

    assert check("name", 1, SERVED, "fast") is None is check("name", 21, SERVED, "fast")
    assert "0.2" in str(check("name", 15, SERVED, "fast")), "the second offer has another share"
    off = SERVED.replace("uniform", "off").replace("keep=0.11", "keep=1.0")
    assert check("name", 15, off, "ocr") is None is check("name", 10.5, off, "ocr"), "served for another minute"
    assert check("name", 15, "", "ocr") is not None is not check("name", 1, "", "ocr")
    times = [checks.InForce(0, 0, 11), checks.InForce(1, 10, 200), checks.InForce(3, 199)]
    assert check("name", 72, "", "ocr") is None is not check("name", 72, off, "ocr"), "and refused then"
    assert check("name", 70.3, "", "ocr") is None is check("name", 70.3, off, "ocr")
    times = [checks.InForce(0, 0, 11), checks.InForce(1, 10, 20), checks.InForce(3, 19)]
    assert check("default", 1, SERVED) is not None and check("default", 25, SERVED) is None, "by the load"
    assert check("setting", 1, SERVED) is None


def test_wrong_metric_sums_are_detected(load: Any, checks: Any) -> None:
    page = """
# HELP tokenprune:requests_total what
tokenprune:requests_total{by="name",model_name="served",profile="fast"} 2.0
tokenprune:requests_total{by="load",model_name="served",profile="fast"} 0.0
tokenprune:visual_tokens_total{keep="0.11",method="uniform",model_name="served",stage="in"} 32.0
tokenprune:visual_tokens_total{keep="0.11",method="uniform",model_name="served",stage="out"} 4.0
tokenprune:refusals_total{model_name="served",reason="limit"} 1.0
tokenprune:reloads_total{model_name="served",result="taken"} 3.0
tokenprune:reloads_total{model_name="served",result="refused"} 1.0
"""
    request, cancelled = load.Request("name", (0,), "what?", "fast"), load.Request("gone", (0,), "what?", leaves=1)
    answered = checks.Sent(request, 0, 1, load.Answer(200, served=SERVED))
    refused = checks.Sent(load.Request("wrong", (0,), "what?"), 0, 1, load.Answer(400))
    broken = checks.Sent(load.Request("broken", (0,), "what?"), 0, 1, load.Answer(400))  # refused by vLLM
    reloads = {"taken": 3, "refused": 1}

    def check(*sent: Any, reloads: dict[str, int] = reloads) -> list[str]:
        return checks.metric_differences(page, sent, reloads)

    assert check(answered, answered, refused, broken) == []
    assert check(answered, checks.Sent(cancelled, 0), refused) == [], "a cancelled request may be counted"
    assert len(check(answered, refused)) == 3, "requests, and tokens of two stages"
    assert len(check(answered, answered, answered, refused)) == 3
    assert check(answered, answered) == ["refusals: counted 1 more than observed, allowed are 0"]
    assert "reloads" in check(answered, answered, refused, reloads={"taken": 4, "refused": 1})[0]


def test_a_request_is_sent_again_once(load: Any) -> None:
    """Only errors of the server are tried again, and once."""

    def send(*statuses: int) -> tuple[Any, int]:
        remaining = list(statuses)

        async def once(request: Any) -> Any:
            return load.Answer(remaining.pop(0))

        client = object.__new__(load.Client)
        client._once = once
        return asyncio.run(client.ask(None)), len(remaining)

    assert send(200, 0) == (load.Answer(200), 1) and send(400, 0) == (load.Answer(400), 1)
    assert send(500, 200, 0) == (load.Answer(200, again=True), 1)
    assert send(500, 500, 0) == (load.Answer(500, again=True), 1)
