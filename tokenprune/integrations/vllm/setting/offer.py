# SPDX-License-Identifier: Apache-2.0
"""Keys of a server's setting beside the reduction: named settings (`profiles`), rules for requests (see rules.py), who
gets which profile (`callers`), profiles under load (`overload`), a file of all these (`reload`), a log of requests
(`log`), freed KV cache after a cut inside the language model (`experimental_free_kv`), and positions of kept tokens
(`positions`)."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import ConfigError, OptionError, TokenPruneError
from tokenprune.files import File
from tokenprune.integrations.vllm.setting.callers import CallerError, Callers
from tokenprune.integrations.vllm.setting.overload import Overload
from tokenprune.integrations.vllm.setting.rules import REFUSE, RULES, Rules
from tokenprune.integrations.vllm.setting.rules import check as _check
from tokenprune.integrations.vllm.setting.settings import IN_LLM, KEY, ServedSetting, check_override
from tokenprune.registry import available_methods, method_info
from tokenprune.setting import SCOPE
from tokenprune.spelling import plain, short

FREE_KV = "experimental_free_kv"
RELOAD = "reload"  # the key that names a file
RELOADED = ("profiles", *RULES, "callers", "overload")  # may stand there, and change while the server runs
# Keys of a server's setting, of no request's.
OFFER = (*RELOADED, RELOAD, "log", FREE_KV, "positions")
POSITIONS = ("original", "renumbered")
PROFILE = "profile"  # the key by which a request names one
DEFAULT = "default"  # the profile that every server has: its own setting
REQUEST = "request"  # label in metrics for a setting that a request wrote itself
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NOTHING: Mapping[str, Any] = {}
_MOST = 32  # profiles
_LARGEST = 2**20  # bytes of the file of `reload`


class ProfileError(OptionError):
    """A request names a profile that the server does not offer."""


def split(layer: Any) -> tuple[Any, dict[str, Any]]:
    """Split a server's setting into the reduction, None if it names none, and the keys of `OFFER`."""
    if not isinstance(layer, Mapping) or not set(layer) & set(OFFER):
        return layer, {}
    rest = {key: value for key, value in layer.items() if key not in OFFER}
    return rest or None, {key: value for key, value in layer.items() if key in OFFER}


def check_spelling(layer: Any) -> None:
    """Raise OptionError for a key of a server's setting that resembles one of ours and is no option of any method."""
    for key in layer if isinstance(layer, Mapping) else ():
        if isinstance(key, str) and key not in SCOPE and (close := difflib.get_close_matches(key, OFFER, 1, 0.75)):
            options = (option for name in available_methods() for option in method_info(name).options)
            if key not in options:
                raise OptionError(f"{KEY} has no key {short(key)}: did you mean {close[0]!r}?")


@dataclass(frozen=True)
class Offer:
    """Profiles and rules that a server sets for its requests.

    profiles: whole settings by name, the server's own as "default".
    rules:    of the server, as "default", and of each profile that has its own.
    callers:  which profiles a caller may use; None: each may use all.
    overload: profiles that stand in for the default under load; None: the default always.
    log:      True to log requests and selections (see log.py).
    free_kv:  True to free the KV cache of dropped tokens in the layers after a cut inside the language model.
    file:     that the keys of `RELOADED` come from, None if they stand in the setting.
    positions: "original" to keep the positions of the full prompt, "renumbered" to count the kept tokens anew; None:
              the default of the model's family.
    """

    profiles: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    rules: Mapping[str, Rules] = field(default_factory=lambda: {DEFAULT: Rules()})
    callers: Callers | None = None
    overload: Overload | None = None
    log: bool = False
    free_kv: bool = False
    positions: str | None = None
    file: str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], server: ServedSetting, read: Callable[[Any], ServedSetting]) -> Offer:
        """Check what a server's setting offers beside `server`. read: makes a whole setting of one profile, which
        stands over the server's own. Raises OptionError."""
        given = with_file(plain(given, KEY))
        profiles = given.get("profiles", {})
        _check(isinstance(profiles, dict), "profiles", 'an object of settings by name, {"fast": {"keep": 0.1}}')
        _check(len(profiles) <= _MOST, "profiles", f"{_MOST} at most, not {len(profiles)}")
        made, rules = {DEFAULT: server}, {DEFAULT: Rules.of(given)}
        for name, layer in profiles.items():
            if name in (DEFAULT, REQUEST) or not _NAME.fullmatch(name):
                raise OptionError(
                    f"{KEY}: {short(name)} cannot be the name of a profile: use letters, digits, '.', '_' and '-', and "
                    f'neither "{DEFAULT}", which is the setting beside the profiles, nor "{REQUEST}"'
                )
            layer, own = split(layer)
            try:
                if others := sorted(set(own) - set(RULES)):
                    raise OptionError(f"{', '.join(others)} holds for the whole server: put it beside the profiles")
                made[name] = server if layer is None else read(layer)
                check_override(server, made[name])
                if own:
                    rules[name] = Rules.of(own, f"profile {name!r}")
            except TokenPruneError as error:
                raise OptionError(f"profile {name!r}: {error}") from error
        callers = Callers.of(given["callers"], made, DEFAULT) if "callers" in given else None
        rule = given.get("overload")
        overload = None if rule is None else Overload.of(rule, made)
        said = _log(given), _free_kv(given, server), _positions(given), given.get(RELOAD)
        offer = cls({name: one.as_dict() for name, one in made.items()}, rules, callers, overload, *said)
        for name, setting in made.items():
            try:
                offer.check(setting, name)
            except OptionError as error:
                raise OptionError(f"profile {name!r}: {error}; the server's own settings have to keep to it") from error
        return offer

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

    def setting(self, asked: Any = _NOTHING) -> ServedSetting:
        """Return the setting in force for a request. asked: the request's value of our key.

        Raises ProfileError, LimitError, OptionError, UnknownMethodError or BudgetError, which are ValueErrors.
        """
        if not isinstance(asked, Mapping):
            return ServedSetting.of(asked, trusted=False)  # raises
        profile = asked.get(PROFILE, DEFAULT)
        server = self.profile(profile)
        if own := sorted(set(asked) & set(OFFER)):
            raise OptionError(f"{KEY}: {', '.join(own)} belongs to the server's setting, not to a request")
        rest = {key: value for key, value in asked.items() if key != PROFILE}
        if not rest:
            return ServedSetting.of(server)
        setting = ServedSetting.of(server, rest, trusted=False)
        check_override(ServedSetting.of(server), setting)
        self.check(setting, profile)
        return setting

    def label(self, asked: Any) -> str:
        """Return the label of a request in metrics: a profile's name, or "request" for a setting of its own."""
        if not asked:
            return DEFAULT
        return asked[PROFILE] if set(asked) == {PROFILE} else REQUEST

    def check(self, setting: ServedSetting, profile: str = DEFAULT) -> None:
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

    def policy(self) -> str:
        """Return the rules in words for the line of the log; empty if there are none."""
        said = {name: rules.said() for name, rules in self.rules.items()}
        lines = [text if name == DEFAULT else f"{name}: {text}" for name, text in said.items() if text]
        return "; ".join(lines + ([] if self.callers is None else [self.callers.said()]))


def with_file(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a server's setting together with those of the file that `reload` names, if there is one.
    Raises OptionError or ConfigError."""
    if RELOAD not in given:
        return given
    path = given[RELOAD]
    _check(isinstance(path, str) and path != "", RELOAD, f"the name of a file, not {short(path)}")
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


def _log(given: Mapping[str, Any]) -> bool:
    if "log" not in given:
        return False
    _check(given["log"] == "json", "log", f'"json", or left out, not {short(given["log"])}')
    return True


def _free_kv(given: Mapping[str, Any], server: ServedSetting) -> bool:
    value = given.get(FREE_KV, False)
    _check(isinstance(value, bool), FREE_KV, f"true or false, not {short(value)}")
    if value and not server.in_llm:
        raise OptionError(
            f"{KEY}: {FREE_KV} gives back what layers behind a cut inside the language model do not need, so it goes "
            f'with "{IN_LLM}": true; a method that acts before the language model saves all of it anyway'
        )
    return value


def _positions(given: Mapping[str, Any]) -> str | None:
    value = given.get("positions")
    if "positions" not in given:
        return None
    known = isinstance(value, str) and value in POSITIONS
    _check(known, "positions", f'"original" (where they stood) or "renumbered" (counted anew), not {short(value)}')
    return value
