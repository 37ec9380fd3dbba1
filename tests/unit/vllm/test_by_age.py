# SPDX-License-Identifier: Apache-2.0
"""Budgets by age in the settings of a vLLM server. tests/vllm/ tests the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from each import each
from served_settings import served
from tests.unit.vllm.test_offer import offer
from tokenprune import Budget
from tokenprune.budgets.by_age import apply_ages
from tokenprune.errors import BudgetError, OptionError
from tokenprune.integrations.vllm.frontend.served import RequestRecord, ServedRequest
from tokenprune.integrations.vllm.gateway import choice
from tokenprune.integrations.vllm.gateway.answers import format_header
from tokenprune.integrations.vllm.gateway.choice import HeldBack
from tokenprune.integrations.vllm.settings.items import (
    OFF,
    count_kept,
    count_requested,
    get_cache_key,
    get_label,
    get_method,
    settings_by_age,
    settings_of_items,
)
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, find_runs
from tokenprune.integrations.vllm.settings.rules import LimitError
from tokenprune.methods.pre_llm.divprune import DivPrune
from tokenprune.settings import Setting

AGE = [[0, 1.0], [1, 0.5], [3, 4]]
KEEPS: list[dict[str, Any]] = [
    {"keep": 1.0, "age": AGE, "step": 2},
    {"keep": 0.3, "age": AGE},
    {"tokens": 30, "age": AGE},
    {"tokens": 3, "age": [[0, 1.0], [1, 2]]},
    {"keep": 1.0, "age": [[0, 1.0], [1, 16], [2, 0.25], [3, 8]]},
]


def list_tiers(setting: Setting) -> list[Setting]:
    """Return the settings of images by age, newest first."""
    return [tier for _, tier in settings_by_age(setting)]


def build_setting(keep: Any, method: str = "divprune", **more: Any) -> Setting:
    return parse_setting({"method": method, "keep": keep} | more)


@each("keep", KEEPS)
@each("method", ["divprune", "pool"])
def test_images_keep_the_tokens_of_their_age(keep: dict[str, Any], method: str) -> None:
    setting, budget = build_setting(keep, method), Budget.from_json(keep)
    assert setting.budget.ages == budget.ages and not setting.keeps_all_tokens
    for counts in ([36], [36, 7, 100], [1, 2, 3, 4, 5, 64, 64, 30]):
        newest_counts = [budget.resolve_keep(count) for count in counts]
        expected = apply_ages(newest_counts, budget.ages.tiers, budget.ages.step)
        item_settings, tiers = settings_of_items(setting, "image", len(counts)), list_tiers(setting)
        assert [
            count_requested(item_setting, count) for item_setting, count in zip(item_settings, counts, strict=True)
        ] == [
            get_method(setting).resolve_count(count, num_kept) for count, num_kept in zip(counts, expected, strict=True)
        ]
        assert item_settings[-1] == tiers[0] and {*item_settings} <= {*tiers}
        assert count_kept(item_settings[-1], 36) == count_kept(build_setting(setting.budget.keep, method), 36)


def test_cache_keys_of_the_settings_of_an_age() -> None:
    """A tier shares its cache key with an equal single-keep setting. The bounds distinguish other tiers."""
    absolute = build_setting(KEEPS[0])
    assert list_tiers(absolute) == [served(DivPrune(), keep) for keep in (1.0, 0.5)] + [list_tiers(absolute)[2]]
    assert [get_cache_key(tier) for tier in list_tiers(absolute)[:2]] == [
        get_cache_key(build_setting(keep)) for keep in (1.0, 0.5)
    ]
    assert list_tiers(absolute)[2].bounds == (0.5, 4) and list_tiers(build_setting(KEEPS[3]))[1] == served(
        DivPrune(), 2
    )
    shares = build_setting({"keep": 0.6, "age": [[0, 1.0], [1, 0.5]]})
    assert list_tiers(shares)[1] == served(DivPrune(), 0.6, bounds=(0.5,))  # differs from keep=0.3 by up to one token
    keys = [
        str(get_cache_key(tier))
        for setting in (absolute, shares, build_setting(KEEPS[1]))
        for tier in list_tiers(setting)
    ]
    assert len(set(keys)) == len(keys)
    assert [get_label(tier) for tier in list_tiers(absolute)] == [("divprune", keep) for keep in ("1", "0.5", "tokens")]
    assert list_tiers(shares)[1].joint_keep == 0.3 and list_tiers(build_setting(KEEPS[2]))[1].joint_keep == 15


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_settings_and_plans_round_trip(keep: dict[str, Any]) -> None:
    setting = build_setting(keep)
    assert parse_setting(setting.to_json()) == setting
    for tier in list_tiers(setting):
        plan = Plan.build(tier, find_runs([9] * 36), False)
        assert Plan.decode(plan.encode()) == plan and Plan.decode(plan.encode()).keep == [count_kept(tier, 36)]


def test_a_request_replaces_keep_as_a_whole() -> None:
    config = offer(
        {"method": "divprune", "keep": KEEPS[0]}, profiles={"chat": {"keep": KEEPS[1]}, "flat": {"keep": 0.5}}
    )
    assert config.setting({"profile": "chat"}) == build_setting(KEEPS[1]) != config.setting() == build_setting(KEEPS[0])
    assert (
        config.setting({"profile": "flat"}).budget.ages is None and config.setting({"keep": 0.25}).budget.ages is None
    )
    assert config.setting({"profile": "flat", "keep": KEEPS[2]}) == build_setting(KEEPS[2])
    assert config.setting({"method": "pool"}) == build_setting(KEEPS[0], "pool") and config.setting({"off": True}).off
    assert build_setting({"keep": 0.5, "age": [[0, 1.0]], "step": 3}) == build_setting(0.5)


def test_limits_hold_for_the_oldest_image() -> None:
    shares = {"keep": 0.8, "age": [[0, 1.0], [2, 0.5], [5, 0.25]]}
    config = offer(min_keep=0.25, methods=["divprune", "pool"])
    assert list_tiers(config.setting({"keep": shares | {"age": shares["age"][:2]}}))[1].joint_keep == 0.4
    with pytest.raises(LimitError, match=r"keep=0\.2 of an image of age 5 is below min_keep"):
        config.setting({"keep": shares})
    with pytest.raises(LimitError, match=r"so keep of an image of age 1 must be a share, not 99 tokens"):
        config.setting({"keep": {"keep": 1.0, "age": [[0, 1.0], [1, 99]]}})
    with pytest.raises(LimitError, match="does not allow random"):
        config.setting({"method": "random", "keep": {"keep": 1.0, "age": [[0, 1.0], [1, 0.5]]}})
    with pytest.raises(OptionError, match=r"profile 'chat': .*keep=0\.2 of an image of age 5"):
        offer(min_keep=0.25, profiles={"chat": {"keep": shares}})


@each(
    ("changes", "message"),
    [
        ({"method": "fastv"}, "fastv does not make a single cut before the language model"),
        ({"method": "dart", "experimental_in_llm": True}, "dart does not make a single cut before"),
        ({"method": "tome"}, "tome does not make a single cut before the language model"),
        ({"method": "dynres"}, "dynres does not make a single cut before the language model"),
        ({"keep": {"keep": 0.5, "age": [[1, 0.5]]}}, "starts with"),
        ({"method": "cdpruner"}, "cdpruner reads the question"),
        ({"method": "evs"}, "evs does not prune images"),
        ({"per": "frame"}, 'and per="image"'),
        ({"keep": {"average_share": 0.5, "age": AGE}}, "must be a number.* optionally with age and step"),
        ({"keep": {"keep": 0.5, "age": AGE, "steps": 2}}, "must be a number"),
        ({"keep": {"keep": 0.5, "age": AGE, "step": True}}, "step=True must be a number of images"),
        ({"keep": {"keep": 0.5, "age": [[0, 1.0], [1, 1.5]]}}, "must end with a share"),
        ({"keep": {"keep": 0.5, "age": "old"}}, "must be pairs"),
        ({"keep": {"age": AGE}}, "must be a number"),
        ({"keep": 0.5, "age": AGE, "step": 2}, 'age and step are part of keep. .*"keep": {"keep": 1.0, "age"'),
    ],
)
def test_settings_that_exclude_ages_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        parse_setting({"method": "divprune", "keep": KEEPS[0]} | changes)


def test_ages_apply_after_pixel_methods() -> None:
    setting = parse_setting({"method": ["dynres", "divprune"], "keep": [0.5, KEEPS[1]]})
    assert {tier.pixel_budget.keep for tier in list_tiers(setting)} == {0.5} and list_tiers(setting)[
        1
    ].joint_keep == 0.075


def test_items_without_a_cache_entry_keep_their_age() -> None:
    """vLLM passes only the items that its cache lacks, indexed from 0."""
    config = offer({"method": "divprune", "keep": {"keep": 1.0, "age": [[0, 1.0], [1, 0.5], [2, 0.25]]}})
    request = ServedRequest.build(config.setting(), {"image": 4, "audio": 1}, RequestRecord())
    keeps = [0.25, 0.25, 0.5, 1.0]
    assert [item.keep for item in request.items["image"]] == keeps
    uncached = request.without_cached({"image": [True, False, True, False], "audio": [False]})
    assert [item.keep for item in uncached.items["image"]] == [keeps[1], keeps[3]]
    assert uncached.items["audio"] == (list_tiers(config.setting())[0],)
    assert uncached.served is request.served and uncached.setting == config.setting()
    held_back = HeldBack(OFF, {"image": (OFF,) * 4}, RequestRecord(), shadow=request)
    uncached_held_back = held_back.without_cached({"image": [True, False, True, False]})
    assert (
        uncached_held_back.shadow.items["image"] == uncached.items["image"]
        and len(uncached_held_back.items["image"]) == 2
    )


def test_requests_that_ages_cannot_count() -> None:
    setting = build_setting(KEEPS[0])
    choice.check_age(setting, {"image": 3, "video": 0})
    choice.check_age(build_setting(0.5), {"video": 1})
    choice.check_age(setting, {}, [1, 1])
    choice.check_age(build_setting(0.5), {}, [4])
    with pytest.raises(OptionError, match="this request has videos: select a profile without age="):
        choice.check_age(setting, {"image": 0, "video": 1})
    with pytest.raises(OptionError, match="split into tiles or crops"):
        choice.check_age(setting, {}, [1, 4])


def test_the_header_counts_aged_images() -> None:
    served = RequestRecord(images=3, method="divprune", tokens_in=100, tokens_out=60, aged=2)
    assert format_header(served) == "divprune;keep=1.0;profile=default;by=default;in=100;out=60;aged=2"
    assert "aged" not in format_header(replace(served, aged=None))
