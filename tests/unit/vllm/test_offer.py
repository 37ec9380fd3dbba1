# SPDX-License-Identifier: Apache-2.0
"""Profiles, limits and overload rules that a server offers to requests. tests/vllm/ tests the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from each import each
from served_settings import served
from tokenprune import available_methods, method_info
from tokenprune.errors import OptionError, TokenPruneError, UnknownMethodError
from tokenprune.integrations.vllm.settings.configuration import check_spelling, split_server_keys
from tokenprune.integrations.vllm.settings.items import OFF, get_cache_key, get_label
from tokenprune.integrations.vllm.settings.keys import SERVER_KEYS
from tokenprune.integrations.vllm.settings.overload import Overload
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.rules import LimitError
from tokenprune.integrations.vllm.settings.server_config import ProfileError, ServerConfig
from tokenprune.methods.pre_llm.divprune import DivPrune

SERVER = {"method": "divprune", "keep": 0.25}
PROFILES = {"fast": {"keep": 0.11}, "ocr": {"off": True}, "small": {"method": "dynres", "keep": 0.5}}


def offer(server: Any = SERVER, **rules: Any) -> ServerConfig:
    """Build a config as `configure` does."""
    layers = [] if server is None else [server]
    return ServerConfig.from_json(rules, parse_setting(*layers), lambda profile: parse_setting(*layers, profile))


def test_a_servers_setting_is_split() -> None:
    assert split_server_keys(SERVER | {"min_keep": 0.1}) == (SERVER, {"min_keep": 0.1})
    assert split_server_keys({"profiles": PROFILES}) == (None, {"profiles": PROFILES})
    assert split_server_keys("file.json") == ("file.json", {}) and split_server_keys({}) == ({}, {})


def test_profiles_override_the_server_and_requests_override_profiles() -> None:
    config = offer(profiles=PROFILES)
    assert config.names == ["fast", "ocr", "small"]
    assert config.setting() == config.setting({"profile": "default"}) == served(DivPrune(), 0.25)
    assert config.setting({"profile": "fast"}) == served(DivPrune(), 0.11)
    assert config.setting({"profile": "ocr"}) == config.setting({"profile": "fast", "off": True}) == OFF
    assert config.setting({"profile": "small"}) == parse_setting({"method": "dynres", "keep": 0.5})
    assert config.setting({"profile": "fast", "method": "pool"}) == parse_setting({"method": "pool", "keep": 0.11})
    assert config.setting({"keep": 0.5}) == served(DivPrune(), 0.5)
    # Equal reductions share a cache key, whichever layer sets them.
    assert get_cache_key(config.setting({"profile": "fast"})) == get_cache_key(config.setting({"keep": 0.11}))
    assert get_cache_key(config.setting({"profile": "fast"})) != get_cache_key(config.setting())


def test_a_server_can_free_the_cache_of_pruned_layers() -> None:
    inside = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
    config = offer(inside, experimental_free_kv=True)
    assert config.free_kv and not offer(inside).free_kv and not offer(inside, experimental_free_kv=False).free_kv
    # The option changes neither the kept tokens nor the cache keys.
    assert config.setting() == offer(inside).setting() and config.setting({"off": True}) == OFF


SERVER_ONLY = [
    "profiles", "min_keep", "methods", "rollout", "on_error", "callers", "overload", "reload", "log", "positions",
    "experimental_free_kv",
]  # fmt: skip


@each("key", SERVER_ONLY)
def test_a_request_cannot_set_server_keys(key: str) -> None:
    assert set(SERVER_ONLY) == set(SERVER_KEYS)
    for request in ({key: 0.1}, {key: "json", "keep": 0.15}, {key: None, "profile": "fast"}):
        with pytest.raises(OptionError, match=f"{key} belongs to the server's configuration, not to a request"):
            offer(profiles=PROFILES, min_keep=0.1).setting(request)


def test_a_server_with_only_profiles_does_not_prune_by_default() -> None:
    config = offer(None, profiles={"fast": SERVER})
    assert config.setting() == OFF and config.setting({"profile": "fast"}) == served(DivPrune(), 0.25)


@each("name", ["fsat", "", "FAST", 3, None, ["fast"], {"a": 1}, "x" * 10_000, "\ud800"])
def test_an_unknown_profile_is_refused(name: Any) -> None:
    with pytest.raises(ProfileError, match=r"does not exist. Use one of: fast, ocr, small, default") as caught:
        offer(profiles=PROFILES).setting({"profile": name})
    assert len(str(caught.value)) < 300
    str(caught.value).encode()
    with pytest.raises(ProfileError, match="Use one of: default"):
        offer().setting({"profile": name})


def test_a_request_is_held_to_the_limits() -> None:
    config = offer(profiles=PROFILES, min_keep=0.1, methods=["divprune", "dynres"])
    assert config.setting({"keep": 0.1}) == served(DivPrune(), 0.1)
    assert config.setting({"off": True}) == OFF
    for request in ({"keep": 0.09}, {"profile": "fast", "keep": 0.09}, {"method": ["dynres", "divprune"], "keep": 0.3}):
        with pytest.raises(LimitError, match=r"0\.09 is below min_keep=0\.1"):
            config.setting(request)
    with pytest.raises(LimitError, match="keep must be a share, not 64 tokens"):
        config.setting({"keep": 64})
    for request in ({"method": "pool"}, {"method": ["downsample", "divprune"], "keep": 0.9}):
        with pytest.raises(LimitError, match=r"does not allow (pool|downsample); allowed are divprune, dynres"):
            config.setting(request)
    with pytest.raises(LimitError):  # the default keep of the method counts too
        offer({"off": True}, min_keep=0.3).setting({"method": "divprune"})


GOLD = {
    "gold": {"keep": 0.5, "min_keep": 0.4, "methods": ["divprune", "pool"]},
    "floor": {"min_keep": 0.2},
    "free": {"keep": 0.11},
}


def test_limits_of_profiles() -> None:
    """The server's limits apply to all profiles. A profile's limits apply to this profile only."""
    config = offer(profiles=GOLD, min_keep=0.1, methods=["divprune", "dynres", "pool"])
    assert config.setting({"profile": "gold"}) == served(DivPrune(), 0.5)
    assert config.setting({"profile": "floor"}) == config.setting() == served(DivPrune(), 0.25)
    assert config.setting({"profile": "gold", "keep": 0.4, "method": "pool"}).keep == 0.4
    assert config.setting({"keep": 0.15}) == config.setting({"profile": "free", "keep": 0.15})
    assert config.setting({"profile": "gold", "off": True}) == OFF
    for profile, min_keep in (("gold", 0.4), ("floor", 0.2)):
        with pytest.raises(LimitError, match=rf"keep=0\.15 is below min_keep={min_keep} of profile '{profile}'"):
            config.setting({"profile": profile, "keep": 0.15})
        with pytest.raises(LimitError, match=rf"profile '{profile}' has min_keep.*not 64 tokens"):
            offer(profiles=GOLD).setting({"profile": profile, "keep": 64})
    for profile in ("floor", "free", "gold"):
        with pytest.raises(LimitError, match=r"keep=0\.09 is below min_keep=0.1 of this server"):
            config.setting({"profile": profile, "keep": 0.09})
        with pytest.raises(LimitError, match="this server does not allow uniform; allowed are divprune, dynres, pool"):
            config.setting({"profile": profile, "method": "uniform"})
    with pytest.raises(LimitError, match="profile 'gold' does not allow dynres; allowed are divprune, pool"):
        config.setting({"profile": "gold", "method": "dynres"})
    assert config.setting({"profile": "floor", "method": "dynres"}).pixel_method is not None


def test_describe_rules() -> None:
    config = offer(profiles=GOLD, min_keep=0.1)
    assert config.describe_rules() == "min_keep 0.1; gold: min_keep 0.4, methods divprune+pool; floor: min_keep 0.2"
    assert offer(profiles=PROFILES).describe_rules() == ""


@each(
    ("rules", "message"),
    [
        ({"profiles": {"gold": {"min_keep": 0.3}}}, "profile 'gold': .*below min_keep=0.3 of profile 'gold'"),
        ({"profiles": {"gold": {"methods": ["pool"]}}}, "profile 'gold': .*does not allow divprune"),
        ({"profiles": {"gold": {"min_keep": 3}}}, "profile 'gold': .*min_keep must be a share"),
        ({"profiles": {"gold": {"methods": []}}}, "profile 'gold': .*methods must be a list"),
        ({"profiles": {"gold": {"methods": ["divprun"]}}}, "profile 'gold': .*did you mean 'divprune'"),
        ({"profiles": {"gold": {"overload": {}, "min_keep": 0.1}}}, "profile 'gold': overload applies to the whole"),
        ({"profiles": ["fast"]}, "profiles must be an object"),
        ({"profiles": {"fast": {"keep": 2.0}}}, "profile 'fast': keep=2.0 is not a valid share"),
        ({"profiles": {"fast": {"profiles": {}}}}, "profile 'fast': profiles applies to the whole server"),
        ({"profiles": {"fast": 3}}, "profile 'fast': .*must be an object"),
        ({"profiles": {"default": {"keep": 0.1}}}, "is not a valid name of a profile"),
        ({"profiles": {"request": {"keep": 0.1}}}, "is not a valid name of a profile"),
        ({"profiles": {"a b": {"keep": 0.1}}}, "is not a valid name of a profile"),
        ({"profiles": {str(index): {"keep": 0.1} for index in range(33)}}, "32 at most"),
        ({"profiles": {"x": {"method": "dart", "experimental_in_llm": True, "pivot_text": 0}}}, "'x': .*whole server"),
        ({"experimental_free_kv": 1}, "experimental_free_kv must be true or false"),
        ({"experimental_free_kv": True}, 'needs "experimental_in_llm": true'),
        ({"min_keep": 1}, "min_keep must be a share"),
        ({"min_keep": 0.0}, "min_keep must be a share"),
        ({"min_keep": None}, "min_keep must be a share"),
        ({"min_keep": 0.3}, "profile 'default': .*below min_keep=0.3 of this server"),
        ({"profiles": PROFILES, "min_keep": 0.2}, "profile 'fast': .*must keep the server.s limits"),
        ({"methods": []}, "methods must be a list"),
        ({"methods": "divprune"}, "methods must be a list"),
        ({"methods": ["pool"]}, "profile 'default': .*does not allow divprune"),
        ({"overload": 3}, "overload must be"),
        ({"overload": {"in_flight": [4], "profiles": []}}, "overload must be"),
        ({"overload": {"in_flight": [4], "profiles": ["fsat"]}, "profiles": PROFILES}, "default, fast, ocr.*'fsat'"),
        ({"overload": {"in_flight": [8, 4], "profiles": ["fast", "ocr"]}, "profiles": PROFILES}, "ascending"),
        ({"overload": {"in_flight": [0], "profiles": ["fast"]}, "profiles": PROFILES}, "whole numbers from 1"),
        ({"overload": {"in_flight": [True], "profiles": ["fast"]}, "profiles": PROFILES}, "whole numbers from 1"),
        ({"overload": {"in_flight": [0.5], "profiles": ["fast"]}, "profiles": PROFILES}, "whole numbers from 1"),
    ],
)
def test_a_bad_offer_stops_the_server(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        offer(**rules)
    with pytest.raises(UnknownMethodError, match="did you mean 'divprune'"):
        offer(methods=["divprun"])


def test_overload_steps() -> None:
    config = offer(profiles=PROFILES, overload={"in_flight": [4, 16], "profiles": ["small", "fast"]})
    assert config.overload == Overload((4, 16), ("small", "fast")) and offer().overload is None
    assert [config.overload.find_step(in_flight) for in_flight in (0, 3, 4, 15, 16, 10**6)] == [0, 0, 1, 1, 2, 2]


def test_positions_is_a_server_key() -> None:
    assert offer().positions is None and offer(positions="original").positions == "original"
    for wrong in ("orginal", None, 3, ["original"]):
        with pytest.raises(OptionError, match='positions must be "original"'):
            offer(positions=wrong)
    with pytest.raises(OptionError, match="profile 'a': positions applies to the whole server"):
        offer(profiles={"a": {"positions": "original"}})


def test_a_key_that_is_misspelt() -> None:
    for key, meant in (("position", "positions"), ("min_kep", "min_keep"), ("profile", "profiles")):
        with pytest.raises(OptionError, match=f"no key '{key}': did you mean '{meant}'"):
            check_spelling(SERVER | {key: 1})
    # Method options (valid or not), file names and non-objects are checked elsewhere.
    for layer in (SERVER, {"method": "fastv", "layer": 2}, {"method": "x", "kep": 1}, "file.json", 3, {3: 4}):
        check_spelling(layer)


def test_labels_of_metrics_are_few() -> None:
    config = offer(profiles=PROFILES)
    requests = [None, {}, {"profile": "fast"}, {"profile": "fast", "keep": 0.5}, {"keep": 0.123456}]
    assert [config.label(request_setting) for request_setting in requests] == [
        "default",
        "default",
        "fast",
        "request",
        "request",
    ]
    assert get_label(OFF) == ("off", "1")
    assert get_label(parse_setting({"method": "pool", "keep": 0.123456})) == ("pool", "0.12")
    assert get_label(parse_setting({"method": "pool", "keep": 64})) == ("pool", "tokens")
    assert get_label(parse_setting({"method": ["divprune", "dynres"], "keep": 0.5})) == ("dynres+divprune", "0.25")


NAMES = available_methods()
OPTIONS = sorted({option for name in NAMES for option in method_info(name).options})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(NAMES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["method", "keep", "per", "off", "profile", "profiles", "min_keep", "overload", *OPTIONS])
VALID = st.fixed_dictionaries(
    {},
    optional={
        "profile": st.sampled_from([*PROFILES, "gold", "default", "fsat"]),
        "method": st.sampled_from(available_methods()) | st.lists(st.sampled_from(available_methods()), max_size=3),
        "keep": st.floats(0, 1) | st.integers(-1, 600) | st.lists(st.floats(0, 1), max_size=3),
        "per": st.sampled_from(["image", "frame", "prompt"]),
        "off": st.booleans(),
    },
)
HOSTILE = VALUES | st.dictionaries(KEYS | st.text(max_size=8), VALUES, max_size=4) | VALID
LIMITED = offer(
    profiles=PROFILES | {"gold": {"keep": 0.5, "min_keep": 0.3}}, min_keep=0.1, methods=["divprune", "dynres", "pool"]
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(request=HOSTILE)
@example(request={"profile": "fast", "keep": 0.10000000001})
@example(request={"profile": "ocr", "keep": 0.5})
@example(request={"profile": "small", "config": "/etc/passwd"})
def test_a_request_gets_a_setting_or_our_error(request: Any) -> None:
    """A hostile request gives a TokenPruneError, or a setting within the limits that survives a JSON round trip."""
    try:
        setting = LIMITED.setting(request)
    except TokenPruneError as error:
        assert isinstance(error, ValueError)  # vLLM answers a ValueError with HTTP 400.
        str(error).encode()
        return
    if setting != OFF:
        min_keep = 0.3 if isinstance(request, dict) and request.get("profile") == "gold" else 0.1
        assert setting.joint_share >= min_keep - 1e-4 and isinstance(setting.budget.keep, float)
        assert {*setting.names} <= {"divprune", "dynres", "pool"}
    assert parse_setting(json.loads(json.dumps(setting.to_json()))) == setting
    assert LIMITED.label(request) in {"default", "request", "gold", *PROFILES}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rules=st.dictionaries(st.sampled_from(["profiles", "min_keep", "methods", "overload"]), VALUES, max_size=4))
def test_a_server_gets_an_offer_or_our_error(rules: Any) -> None:
    try:
        config = offer(**rules)
    except TokenPruneError as error:
        assert isinstance(error, ValueError)
    else:
        assert config.setting() == served(DivPrune(), 0.25)
