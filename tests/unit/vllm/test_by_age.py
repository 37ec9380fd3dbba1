# SPDX-License-Identifier: Apache-2.0
"""Budgets by age in a server's setting: what each image of a request has. For the engine see tests/vllm/."""

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


def tiers_of(setting: Setting) -> list[Setting]:
    """Return the settings that an image can have by its age, newest first."""
    return [tier for _, tier in settings_by_age(setting)]


def setting(keep: Any, method: str = "divprune", **more: Any) -> Setting:
    return parse_setting({"method": method, "keep": keep} | more)


@each("keep", KEEPS)
@each("method", ["divprune", "pool"])
def test_an_image_keeps_what_the_budget_says(keep: dict[str, Any], method: str) -> None:
    made, budget = setting(keep, method), Budget.from_json(keep)
    assert made.budget.ages == budget.ages and not made.keeps_all_tokens
    for counts in ([36], [36, 7, 100], [1, 2, 3, 4, 5, 64, 64, 30]):
        new = [budget.resolve_keep(count) for count in counts]
        wanted = apply_ages(new, budget.ages.tiers, budget.ages.step)
        own, tiers = settings_of_items(made, "image", len(counts)), tiers_of(made)
        assert [count_requested(one, count) for one, count in zip(own, counts, strict=True)] == [
            get_method(made).resolve_count(count, number) for count, number in zip(counts, wanted, strict=True)
        ]
        assert own[-1] == tiers[0] and {*own} <= {*tiers}
        assert count_kept(own[-1], 36) == count_kept(setting(made.budget.keep, method), 36)


def test_an_image_at_its_age_is_what_another_setting_says() -> None:
    """So caches share it, where a single keep says the same; else its bounds tell it from others."""
    whole = setting(KEEPS[0])
    assert tiers_of(whole) == [served(DivPrune(), keep) for keep in (1.0, 0.5)] + [tiers_of(whole)[2]]
    assert [get_cache_key(one) for one in tiers_of(whole)[:2]] == [get_cache_key(setting(keep)) for keep in (1.0, 0.5)]
    assert tiers_of(whole)[2].bounds == (0.5, 4) and tiers_of(setting(KEEPS[3]))[1] == served(DivPrune(), 2)
    shares = setting({"keep": 0.6, "age": [[0, 1.0], [1, 0.5]]})
    assert tiers_of(shares)[1] == served(DivPrune(), 0.6, bounds=(0.5,))  # 1 token more or less than 0.3
    keys = [str(get_cache_key(one)) for made in (whole, shares, setting(KEEPS[1])) for one in tiers_of(made)]
    assert len(set(keys)) == len(keys)
    assert [get_label(tier) for tier in tiers_of(whole)] == [("divprune", keep) for keep in ("1", "0.5", "tokens")]
    assert tiers_of(shares)[1].joint_keep == 0.3 and tiers_of(setting(KEEPS[2]))[1].joint_keep == 15


@pytest.mark.parametrize("keep", KEEPS, ids=str)
def test_it_survives_the_journey(keep: dict[str, Any]) -> None:
    made = setting(keep)
    assert parse_setting(made.to_json()) == made
    for tier in tiers_of(made):
        plan = Plan.build(tier, find_runs([9] * 36), False)
        assert Plan.decode(plan.encode()) == plan and Plan.decode(plan.encode()).keep == [count_kept(tier, 36)]


def test_a_request_replaces_keep_as_a_whole() -> None:
    made = offer({"method": "divprune", "keep": KEEPS[0]}, profiles={"chat": {"keep": KEEPS[1]}, "flat": {"keep": 0.5}})
    assert made.setting({"profile": "chat"}) == setting(KEEPS[1]) != made.setting() == setting(KEEPS[0])
    assert made.setting({"profile": "flat"}).budget.ages is None and made.setting({"keep": 0.25}).budget.ages is None
    assert made.setting({"profile": "flat", "keep": KEEPS[2]}) == setting(KEEPS[2])
    assert made.setting({"method": "pool"}) == setting(KEEPS[0], "pool") and made.setting({"off": True}).off
    assert setting({"keep": 0.5, "age": [[0, 1.0]], "step": 3}) == setting(0.5)


def test_limits_hold_for_the_oldest_image() -> None:
    shares = {"keep": 0.8, "age": [[0, 1.0], [2, 0.5], [5, 0.25]]}
    made = offer(min_keep=0.25, methods=["divprune", "pool"])
    assert tiers_of(made.setting({"keep": shares | {"age": shares["age"][:2]}}))[1].joint_keep == 0.4
    with pytest.raises(LimitError, match=r"keep=0\.2 of an image of age 5 is below min_keep"):
        made.setting({"keep": shares})
    with pytest.raises(LimitError, match=r"so keep of an image of age 1 must be a share, not 99 tokens"):
        made.setting({"keep": {"keep": 1.0, "age": [[0, 1.0], [1, 99]]}})
    with pytest.raises(LimitError, match="does not allow random"):
        made.setting({"method": "random", "keep": {"keep": 1.0, "age": [[0, 1.0], [1, 0.5]]}})
    with pytest.raises(OptionError, match=r"profile 'chat': .*keep=0\.2 of an image of age 5"):
        offer(min_keep=0.25, profiles={"chat": {"keep": shares}})


@each(
    ("given", "says"),
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
def test_what_has_no_age_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        parse_setting({"method": "divprune", "keep": KEEPS[0]} | given)


def test_pixels_shrink_alike_and_ages_count_behind_them() -> None:
    made = parse_setting({"method": ["dynres", "divprune"], "keep": [0.5, KEEPS[1]]})
    assert {one.pixel_budget.keep for one in tiers_of(made)} == {0.5} and tiers_of(made)[1].joint_keep == 0.075


def test_places_of_items_that_are_not_cached() -> None:
    """vLLM hands over what its cache lacks, counted anew."""
    made = offer({"method": "divprune", "keep": {"keep": 1.0, "age": [[0, 1.0], [1, 0.5], [2, 0.25]]}})
    request = ServedRequest.build(made.setting(), {"image": 4, "audio": 1}, RequestRecord())
    keeps = [0.25, 0.25, 0.5, 1.0]
    assert [one.keep for one in request.items["image"]] == keeps
    rest = request.without_cached({"image": [True, False, True, False], "audio": [False]})
    assert [one.keep for one in rest.items["image"]] == [keeps[1], keeps[3]]
    assert rest.items["audio"] == (tiers_of(made.setting())[0],)
    assert rest.served is request.served and rest.setting == made.setting()
    held = HeldBack(OFF, {"image": (OFF,) * 4}, RequestRecord(), shadow=request)
    less = held.without_cached({"image": [True, False, True, False]})
    assert less.shadow.items["image"] == rest.items["image"] and len(less.items["image"]) == 2


def test_requests_that_ages_cannot_count() -> None:
    made = setting(KEEPS[0])
    choice.check_age(made, {"image": 3, "video": 0})
    choice.check_age(setting(0.5), {"video": 1})
    choice.check_age(made, {}, [1, 1])
    choice.check_age(setting(0.5), {}, [4])
    with pytest.raises(OptionError, match="this request has videos: select a profile without age="):
        choice.check_age(made, {"image": 0, "video": 1})
    with pytest.raises(OptionError, match="split into tiles or crops"):
        choice.check_age(made, {}, [1, 4])


def test_the_answer_says_how_many_aged() -> None:
    served = RequestRecord(images=3, method="divprune", tokens_in=100, tokens_out=60, aged=2)
    assert format_header(served) == "divprune;keep=1.0;profile=default;by=default;in=100;out=60;aged=2"
    assert "aged" not in format_header(replace(served, aged=None))
