# SPDX-License-Identifier: Apache-2.0
"""`ServerConfig`: profiles, rules and options of a server.

The keys are named settings (`profiles`), rules for requests (rules.py), profiles by caller (`callers`) and by load
(`overload`), a file that holds these keys (`reload`), and `log`, `positions` and `experimental_free_kv`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import ConfigError, OptionError, TokenPruneError, shorten
from tokenprune.integrations.vllm.log import SERVER
from tokenprune.integrations.vllm.settings.callers import CallerError, Callers
from tokenprune.integrations.vllm.settings.configuration import check_key, get_server_setting, split_server_keys
from tokenprune.integrations.vllm.settings.keys import (
    DEFAULT,
    FREE_KV,
    GATEWAY_KEYS,
    KEY,
    NO_SETTING,
    PROFILE,
    REQUEST,
    RULES,
    SERVER_KEYS,
)
from tokenprune.integrations.vllm.settings.overload import Overload
from tokenprune.integrations.vllm.settings.parse import check_override, parse_request, parse_setting
from tokenprune.integrations.vllm.settings.rules import REFUSE, Rules
from tokenprune.selection.files import File
from tokenprune.settings import IN_LLM, Setting
from tokenprune.settings.json_values import to_plain_json

logger = logging.getLogger(SERVER)
GRACE_SECONDS = 60.0  # requests may use a removed profile for this time
POSITIONS = ("original", "renumbered")
HTTP = "vllm.entrypoints.launchers.app"  # only the process of an HTTP server imports it
SERVER_CONFIG = f"{KEY}_server"  # attribute of a multimodal config
_REPLACED = f"{KEY}_replaced"
RELOAD = "reload"  # the key that names a file
RELOADED = tuple(key for key in GATEWAY_KEYS if key != RELOAD)  # keys of this file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MAX_PROFILES = 32
_MAX_BYTES = 2**20  # of the file of `reload`


class ProfileError(OptionError):
    """The request selects a profile that the server does not have."""

    reason = "profile"


@dataclass(frozen=True)
class ServerConfig:
    """Profiles, rules and options of a server: the keys `SERVER_KEYS` of its configuration.

    Args:
        profiles: Normalized settings by name, as JSON. The server's own setting is "default".
        rules: Rules of the server as "default", and of each profile that has rules.
        callers: Profiles that each caller may use. None: every caller may use all profiles.
        overload: Profiles that replace the default under load. None: always the default.
        file: Name of the file that holds the keys of `RELOADED`. None if they are in the server's configuration.
        log: Whether requests and selections are logged as JSON (see log.py).
        free_kv: Whether layers after a cut inside the language model free the KV cache of dropped tokens.
        positions: "original" keeps the positions of the full prompt, "renumbered" counts the kept tokens. None: default
            of the family.
        uses_gateway: Whether `gateway` handles all requests, also those of `LLM(...)` in Python.
    """

    profiles: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    rules: Mapping[str, Rules] = field(default_factory=lambda: {DEFAULT: Rules()})
    callers: Callers | None = None
    overload: Overload | None = None
    file: str | None = None
    log: bool = False
    free_kv: bool = False
    positions: str | None = None
    uses_gateway: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any], server: Setting, read: Callable[[Any], Setting]) -> ServerConfig:
        """Read and check the server keys; raise OptionError.

        Args:
            value: The keys of `SERVER_KEYS`.
            server: The server's own setting.
            read: Function that merges the layer of a profile onto the server's own setting.
        """
        log, free_kv, positions = _read_engine_keys(value, server)
        uses_gateway = bool(set(value) & set(GATEWAY_KEYS)) or server.budget.ages is not None
        value = merge_reload_file(to_plain_json(value, KEY))
        profiles = value.get("profiles", {})
        check_key(isinstance(profiles, dict), "profiles", 'an object of settings by name, {"fast": {"keep": 0.1}}')
        check_key(len(profiles) <= _MAX_PROFILES, "profiles", f"{_MAX_PROFILES} at most, not {len(profiles)}")
        settings, rules = {DEFAULT: server}, {DEFAULT: Rules.from_json(value)}
        for name, layer in profiles.items():
            if name in (DEFAULT, REQUEST) or not _NAME.fullmatch(name):
                raise OptionError(
                    f"{KEY}: {shorten(name)} is not a valid name of a profile. Use letters, digits, '.', '_' and '-', "
                    f'but not "{DEFAULT}" or "{REQUEST}".'
                )
            layer, keys = split_server_keys(layer)
            try:
                if others := sorted(set(keys) - set(RULES)):
                    raise OptionError(f"{', '.join(others)} applies to the whole server. Put it beside the profiles.")
                settings[name] = server if layer is None else read(layer)
                check_override(server, settings[name])
                if keys:
                    rules[name] = Rules.from_json(keys, f"profile {name!r}")
            except TokenPruneError as error:
                raise OptionError(f"profile {name!r}: {error}") from error
        callers = Callers.from_json(value["callers"], settings, DEFAULT) if "callers" in value else None
        rule = value.get("overload")
        overload = None if rule is None else Overload.from_json(rule, settings)
        as_json = {name: setting.to_json() for name, setting in settings.items()}
        config = cls(as_json, rules, callers, overload, value.get(RELOAD), log, free_kv, positions, uses_gateway)
        for name, setting in settings.items():
            try:
                config.check(setting, name)
            except OptionError as error:
                raise OptionError(f"profile {name!r}: {error}. Profiles must keep the server's limits") from error
        return config

    @property
    def names(self) -> list[str]:
        """Names of the profiles without "default"."""
        return [name for name in self.profiles if name != DEFAULT]

    def profile(self, name: Any, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return the setting of a profile as JSON; raise ProfileError if it does not exist.

        A profile outside `allowed`, the names that the caller may use, raises CallerError whether or not it exists.
        """
        if allowed is not None and name not in allowed:
            raise CallerError(
                f"{KEY}: this caller may not use profile {shorten(name)}; it may use {', '.join(allowed)}"
            )
        if isinstance(name, str) and name in self.profiles:
            return self.profiles[name]
        names = ", ".join([*self.names, DEFAULT])
        raise ProfileError(f"{KEY}: profile {shorten(name)} does not exist. Use one of: {names}")

    def setting(self, requested: Any = NO_SETTING) -> Setting:
        """Return the setting of a request with this value of `KEY`.

        Raises ProfileError, LimitError, OptionError, UnknownMethodError or BudgetError, which are ValueErrors.
        """
        if not isinstance(requested, Mapping):
            return parse_setting(requested, trusted=False)  # raises
        profile = requested.get(PROFILE, DEFAULT)
        server = self.profile(profile)
        if keys := sorted(set(requested) & set(SERVER_KEYS)):
            raise OptionError(f"{KEY}: {', '.join(keys)} belongs to the server's configuration, not to a request")
        rest = {key: value for key, value in requested.items() if key != PROFILE}
        setting = parse_request(server, rest)
        if rest:
            self.check(setting, profile)
        return setting

    def label(self, requested: Any) -> str:
        """Return the metrics label of a request: the name of a profile, or "request" for any other setting."""
        if not requested:
            return DEFAULT
        return requested[PROFILE] if set(requested) == {PROFILE} else REQUEST

    def check(self, setting: Setting, profile: str = DEFAULT) -> None:
        """Raise LimitError if a setting based on a profile exceeds the limits of the server or of the profile."""
        for name in dict.fromkeys((DEFAULT, profile)):
            if name in self.rules:
                self.rules[name].check(setting)

    def rollout(self, profile: str) -> float:
        """Return the share of a profile's requests that are pruned."""
        return float(self._rule(profile, "rollout", 1.0))

    def on_error(self, profile: str) -> str:
        """Return `FULL` or `REFUSE`, the handling of a profile's requests that fail under their setting."""
        return str(self._rule(profile, "on_error", REFUSE))

    def _rule(self, profile: str, key: str, default: Any) -> Any:
        values = [getattr(self.rules[name], key) for name in (profile, DEFAULT) if name in self.rules]
        return next((value for value in values if value is not None), default)

    def describe_rules(self) -> str:
        """Describe all rules for the log. Empty if there are none."""
        texts = {name: rules.describe() for name, rules in self.rules.items()}
        lines = [text if name == DEFAULT else f"{name}: {text}" for name, text in texts.items() if text]
        return "; ".join(lines + ([] if self.callers is None else [self.callers.describe()]))


def _read_engine_keys(value: Mapping[str, Any], server: Setting) -> tuple[bool, bool, str | None]:
    """Return the values of `log`, `experimental_free_kv` and `positions`; raise OptionError."""
    log, free_kv, positions = value.get("log"), value.get(FREE_KV, False), value.get("positions")
    check_key("log" not in value or log == "json", "log", f'"json", or left out, not {shorten(log)}')
    check_key(isinstance(free_kv, bool), FREE_KV, f"true or false, not {shorten(free_kv)}")
    if free_kv and not server.in_llm:
        raise OptionError(
            f'{KEY}: {FREE_KV} needs "{IN_LLM}": true. Methods that act before the language model never cache the '
            "dropped tokens"
        )
    is_known = "positions" not in value or (isinstance(positions, str) and positions in POSITIONS)
    check_key(is_known, "positions", f'"original" or "renumbered", not {shorten(positions)}')
    return log is not None, free_kv, positions


def merge_reload_file(value: dict[str, Any]) -> dict[str, Any]:
    """Return the server keys, merged with the keys in the `reload` file; raise OptionError or ConfigError."""
    if RELOAD not in value:
        return value
    path = value[RELOAD]
    check_key(isinstance(path, str) and path != "", RELOAD, f"the name of a file, not {shorten(path)}")
    if duplicates := sorted(set(value) & set(RELOADED)):
        raise OptionError(f"{KEY}: {', '.join(duplicates)} belongs in the {RELOAD} file {path}, not beside it")
    try:
        content = json.loads(File.read(path, _MAX_BYTES).content)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}: cannot read {path} as JSON: {error}") from error
    if not isinstance(content, dict) or (others := sorted(set(content) - set(RELOADED))):
        problem = f"not {shorten(others)}" if isinstance(content, dict) else f"in an object, not {shorten(content)}"
        raise ConfigError(f"{KEY}: {path} may hold {', '.join(RELOADED)}, {problem}")
    return value | to_plain_json(content, path)


# -- current config. Requests may arrive after a reload that their client does not know of


def get_server_config(model_config: Any) -> ServerConfig:
    """Return the config of a server. Without server keys it has only the profile "default"."""
    config = getattr(model_config.multimodal_config, SERVER_CONFIG, None)
    return ServerConfig({DEFAULT: get_server_setting(model_config) or {}}) if config is None else config


def set_server_config(model_config: Any, config: ServerConfig) -> None:
    """Set the config of a server in this process."""
    setattr(model_config.multimodal_config, SERVER_CONFIG, config)


def get_profile_settings(model_config: Any) -> dict[str, Setting]:
    """Return the setting of each profile, including "default"."""
    profiles = get_server_config(model_config).profiles
    return {name: parse_setting(setting) for name, setting in profiles.items()}


def needs_gateway(model_config: Any, requested: Any = NO_SETTING) -> bool:
    """Return True if `gateway` has to handle a server, or a request with this value of `KEY`."""
    if HTTP in sys.modules or get_server_config(model_config).uses_gateway or not isinstance(requested, Mapping):
        return True
    keep = requested.get("keep")
    budgets = keep if isinstance(keep, list | tuple) else [keep]
    by_age = any(isinstance(budget, Mapping) and "age" in budget for budget in budgets)
    return by_age or bool(set(requested) & {PROFILE, *SERVER_KEYS})


@dataclass
class _Replaced:
    """A config replaced by a reload, and the time until which its profiles are served."""

    config: ServerConfig
    until: float  # time.monotonic()
    logged: set[str] = field(default_factory=set)


def begin_grace(model_config: Any, before: ServerConfig) -> None:
    """Continue to serve removed profiles of `before` for `GRACE_SECONDS`."""
    now = time.monotonic()
    recent = [replaced for replaced in _get_replaced(model_config) if replaced.until > now]
    setattr(model_config.multimodal_config, _REPLACED, [_Replaced(before, now + GRACE_SECONDS), *recent])


def find_server_config(model_config: Any, find_name: Callable[[ServerConfig], Any]) -> ServerConfig:
    """Return the current config, or the most recent replaced config with the profile that the request selects.

    `find_name` returns the name that the request selects on a server with the passed config. It may have any type.
    """
    config = get_server_config(model_config)
    for replaced in _get_replaced(model_config):
        name = find_name(replaced.config)
        if isinstance(name, str) and name in replaced.config.profiles and name not in config.profiles:
            if (seconds := replaced.until - time.monotonic()) <= 0:
                break
            if name not in replaced.logged:
                replaced.logged.add(name)
                text = "tokenprune: requests use the removed profile %s, which is served for another %.0f s"
                logger.warning(text, name, seconds)
            return replaced.config
    return config


def _get_replaced(model_config: Any) -> list[_Replaced]:
    return getattr(model_config.multimodal_config, _REPLACED, [])
