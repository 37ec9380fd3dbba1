# SPDX-License-Identifier: Apache-2.0
"""`ServerConfig`: the keys of a server's setting beside the reduction. They are named settings (`profiles`), rules for
requests (rules.py), who gets which profile (`callers`), profiles under load (`overload`), a file of all these
(`reload`), and `log`, `positions` and `experimental_free_kv` for the whole server."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import ConfigError, OptionError, TokenPruneError, short
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
from tokenprune.settings.json_values import plain

logger = logging.getLogger(SERVER)
GRACE_SECONDS = 60.0  # for which profiles are served that a reload has removed
POSITIONS = ("original", "renumbered")
HTTP = "vllm.entrypoints.launchers.app"  # imported in the process of a server
SERVER_CONFIG = f"{KEY}_server"  # attribute of a multimodal config
_LEFT = f"{KEY}_left"
RELOAD = "reload"  # the key that names a file
RELOADED = tuple(key for key in GATEWAY_KEYS if key != RELOAD)  # may stand there, and change while the server runs
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_MOST = 32  # profiles
_LARGEST = 2**20  # bytes of the file of `reload`


class ProfileError(OptionError):
    """A request names a profile that the server does not offer."""

    reason = "profile"


@dataclass(frozen=True)
class ServerConfig:
    """Profiles, rules and options of a server: the keys `SERVER_KEYS` of its configuration.

    profiles:     whole settings by name, the server's own as "default".
    rules:        of the server, as "default", and of each profile that has its own.
    callers:      profiles that each caller may use; None: each may use all.
    overload:     profiles that replace the default under load; None: the default always.
    file:         the file that the keys of `RELOADED` come from, None if they stand in the setting.
    log:          True to log requests and selections (see log.py).
    free_kv:      True to free the KV cache of dropped tokens in the layers after a cut inside the language model.
    positions:    "original" to keep the positions of the full prompt, "renumbered" to count the kept tokens anew; None:
                  the default of the model's family.
    uses_gateway: True if `gateway` acts on requests, also where they come from Python and not by HTTP.
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
    def from_json(cls, given: Mapping[str, Any], server: Setting, read: Callable[[Any], Setting]) -> ServerConfig:
        """Read the keys beside the setting of a server, and check them.

        Args:
            given: The keys, those of `SERVER_KEYS`.
            server: The server's own setting.
            read: Function that makes a whole setting of a profile, which is merged onto the server's own.

        Raises:
            OptionError: If a key is invalid.
        """
        log, free_kv, positions = _read_engine_keys(given, server)
        uses_gateway = bool(set(given) & set(GATEWAY_KEYS)) or server.budget.ages is not None
        given = merge_reload_file(plain(given, KEY))
        profiles = given.get("profiles", {})
        check_key(isinstance(profiles, dict), "profiles", 'an object of settings by name, {"fast": {"keep": 0.1}}')
        check_key(len(profiles) <= _MOST, "profiles", f"{_MOST} at most, not {len(profiles)}")
        made, rules = {DEFAULT: server}, {DEFAULT: Rules.from_json(given)}
        for name, layer in profiles.items():
            if name in (DEFAULT, REQUEST) or not _NAME.fullmatch(name):
                raise OptionError(
                    f"{KEY}: {short(name)} cannot be the name of a profile: use letters, digits, '.', '_' and '-', and "
                    f'neither "{DEFAULT}", which is the setting beside the profiles, nor "{REQUEST}"'
                )
            layer, own = split_server_keys(layer)
            try:
                if others := sorted(set(own) - set(RULES)):
                    raise OptionError(f"{', '.join(others)} holds for the whole server: put it beside the profiles")
                made[name] = server if layer is None else read(layer)
                check_override(server, made[name])
                if own:
                    rules[name] = Rules.from_json(own, f"profile {name!r}")
            except TokenPruneError as error:
                raise OptionError(f"profile {name!r}: {error}") from error
        callers = Callers.from_json(given["callers"], made, DEFAULT) if "callers" in given else None
        rule = given.get("overload")
        overload = None if rule is None else Overload.from_json(rule, made)
        whole = {name: one.to_json() for name, one in made.items()}
        config = cls(whole, rules, callers, overload, given.get(RELOAD), log, free_kv, positions, uses_gateway)
        for name, setting in made.items():
            try:
                config.check(setting, name)
            except OptionError as error:
                raise OptionError(f"profile {name!r}: {error}; the server's own settings have to keep to it") from error
        return config

    @property
    def names(self) -> list[str]:
        """The profiles that the operator named."""
        return [name for name in self.profiles if name != DEFAULT]

    def profile(self, name: Any, may: tuple[str, ...] | None = None) -> dict[str, Any]:
        """Return the whole setting of a profile. may: names that the caller may use; None: all. Raises ProfileError, or
        CallerError for one that it may not, whether or not it is there."""
        if may is not None and name not in may:
            raise CallerError(f"{KEY}: this caller may not use profile {short(name)}; it may use {', '.join(may)}")
        if isinstance(name, str) and name in self.profiles:
            return self.profiles[name]
        there = f"it has {', '.join(self.names)}" if self.names else "it names none"
        raise ProfileError(f"{KEY}: this server has no profile {short(name)}; {there}, and {DEFAULT}")

    def setting(self, asked: Any = NO_SETTING) -> Setting:
        """Return the setting in force for a request. asked: the request's value of our key.

        Raises ProfileError, LimitError, OptionError, UnknownMethodError or BudgetError, which are ValueErrors.
        """
        if not isinstance(asked, Mapping):
            return parse_setting(asked, trusted=False)  # raises
        profile = asked.get(PROFILE, DEFAULT)
        server = self.profile(profile)
        if own := sorted(set(asked) & set(SERVER_KEYS)):
            raise OptionError(f"{KEY}: {', '.join(own)} belongs to the server's setting, not to a request")
        rest = {key: value for key, value in asked.items() if key != PROFILE}
        setting = parse_request(server, rest)
        if rest:
            self.check(setting, profile)
        return setting

    def label(self, asked: Any) -> str:
        """Return the label of a request in metrics: a profile's name, or "request" for a setting of its own."""
        if not asked:
            return DEFAULT
        return asked[PROFILE] if set(asked) == {PROFILE} else REQUEST

    def check(self, setting: Setting, profile: str = DEFAULT) -> None:
        """Raise LimitError for a setting beyond the server's limits or those of a profile, over which it stands."""
        for name in dict.fromkeys((DEFAULT, profile)):
            if name in self.rules:
                self.rules[name].check(setting)

    def rollout(self, profile: str) -> float:
        """Return the share of a profile's requests that are reduced."""
        return float(self._rule(profile, "rollout", 1.0))

    def on_error(self, profile: str) -> str:
        """Return what is done with a profile's requests that cannot be served under their setting."""
        return str(self._rule(profile, "on_error", REFUSE))

    def _rule(self, profile: str, key: str, otherwise: Any) -> Any:
        said = [getattr(self.rules[name], key) for name in (profile, DEFAULT) if name in self.rules]
        return next((value for value in said if value is not None), otherwise)

    def describe_rules(self) -> str:
        """Return the rules in words for the line of the log; empty if there are none."""
        said = {name: rules.describe() for name, rules in self.rules.items()}
        lines = [text if name == DEFAULT else f"{name}: {text}" for name, text in said.items() if text]
        return "; ".join(lines + ([] if self.callers is None else [self.callers.describe()]))


def _read_engine_keys(given: Mapping[str, Any], server: Setting) -> tuple[bool, bool, str | None]:
    """Return the values of `log`, `experimental_free_kv` and `positions`; raises OptionError."""
    log, free_kv, positions = given.get("log"), given.get(FREE_KV, False), given.get("positions")
    check_key("log" not in given or log == "json", "log", f'"json", or left out, not {short(log)}')
    check_key(isinstance(free_kv, bool), FREE_KV, f"true or false, not {short(free_kv)}")
    if free_kv and not server.in_llm:
        raise OptionError(
            f"{KEY}: {FREE_KV} gives back what layers after a cut inside the language model do not need, so it "
            f'goes with "{IN_LLM}": true; a method that acts before the language model saves all of it anyway'
        )
    known = "positions" not in given or (isinstance(positions, str) and positions in POSITIONS)
    wanted = f'"original" (where they stood) or "renumbered" (counted anew), not {short(positions)}'
    check_key(known, "positions", wanted)
    return log is not None, free_kv, positions


def merge_reload_file(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a server's setting together with those of the file that `reload` names, if there is one.
    Raises OptionError or ConfigError."""
    if RELOAD not in given:
        return given
    path = given[RELOAD]
    check_key(isinstance(path, str) and path != "", RELOAD, f"the name of a file, not {short(path)}")
    if twice := sorted(set(given) & set(RELOADED)):
        raise OptionError(f"{KEY}: {', '.join(twice)} belongs into the file of {RELOAD}, {path}, not beside it")
    try:
        found = json.loads(File.read(path, _LARGEST).content)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{KEY}: cannot read {path} as JSON: {error}") from error
    if not isinstance(found, dict) or (others := sorted(set(found) - set(RELOADED))):
        what = f"not {short(others)}" if isinstance(found, dict) else f"in an object, not {short(found)}"
        raise ConfigError(f"{KEY}: {path} may hold {', '.join(RELOADED)}, {what}")
    return given | plain(found, path)


# -- the config in force. Clients learn of a reload later than the server, and a request may be older than the reload


def get_server_config(model_config: Any) -> ServerConfig:
    """Return the config of a server; only its setting as "default" if none was read."""
    config = getattr(model_config.multimodal_config, SERVER_CONFIG, None)
    return ServerConfig({DEFAULT: get_server_setting(model_config) or {}}) if config is None else config


def set_server_config(model_config: Any, config: ServerConfig) -> None:
    """Set the config of a server from now on, in this process."""
    setattr(model_config.multimodal_config, SERVER_CONFIG, config)


def get_profile_settings(model_config: Any) -> dict[str, Setting]:
    """Return the settings of requests that write no setting of their own, by profile."""
    profiles = get_server_config(model_config).profiles
    return {name: parse_setting(setting) for name, setting in profiles.items()}


def needs_gateway(model_config: Any, asked: Any = NO_SETTING) -> bool:
    """Return True if `gateway` acts on a server with a setting, or on a request to it. asked: the request's value of
    our key."""
    if HTTP in sys.modules or get_server_config(model_config).uses_gateway or not isinstance(asked, Mapping):
        return True
    keep = asked.get("keep")
    budgets = keep if isinstance(keep, list | tuple) else [keep]  # of a stack, one for each method
    by_age = any(isinstance(budget, Mapping) and "age" in budget for budget in budgets)
    return by_age or bool(set(asked) & {PROFILE, *SERVER_KEYS})


@dataclass
class _Left:
    """A config that a reload replaced, and until when its profiles are served. said: profiles that the log names."""

    config: ServerConfig
    until: float
    said: set[str] = field(default_factory=set)


def begin_grace(model_config: Any, before: ServerConfig) -> None:
    """Serve the profiles of `before` that the server no longer has for `GRACE_SECONDS` from now."""
    now = time.monotonic()
    kept = [one for one in _left(model_config) if one.until > now]
    setattr(model_config.multimodal_config, _LEFT, [_Left(before, now + GRACE_SECONDS), *kept])


def find_server_config(model_config: Any, named: Callable[[ServerConfig], Any]) -> ServerConfig:
    """Return the server's config for a request, or the last one that had the profile that the request names.

    named: returns the name that the request gives to a server with this config; of any type.
    """
    config = get_server_config(model_config)
    for one in _left(model_config):
        name = named(one.config)
        if isinstance(name, str) and name in one.config.profiles and name not in config.profiles:
            if (seconds := one.until - time.monotonic()) <= 0:
                break
            if name not in one.said:
                one.said.add(name)
                text = (
                    "tokenprune: profile %s has left with a reload, and requests name it: served as before, %.0f s more"
                )
                logger.warning(text, name, seconds)
            return one.config
    return config


def _left(model_config: Any) -> list[_Left]:
    return getattr(model_config.multimodal_config, _LEFT, [])
