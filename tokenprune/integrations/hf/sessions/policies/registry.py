# SPDX-License-Identifier: Apache-2.0
"""The registry of policies: one decorator, lookup with near names, entry points of third parties."""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable
from typing import Any, TypeVar

from tokenprune.errors import OptionError, RegistrationError, UnknownPolicyError
from tokenprune.integrations.hf.sessions.policies.base import Policy
from tokenprune.methods.registry import build_from_options, import_all, suggest_nearest

ENTRY_POINT_GROUP = "tokenprune.policies"

_POLICIES: dict[str, type[Policy]] = {}
_loaded = False

P = TypeVar("P", bound=type[Policy])


def register_policy(name: str) -> Callable[[P], P]:
    """Register a frozen dataclass derived from `Policy` under `name`.

    Packages offer theirs by the entry-point group `tokenprune.policies`. Raises RegistrationError for a name that is
    taken or no lower-case identifier, and for a class that is no frozen dataclass, has another base or no docstring.
    """

    def decorate(cls: P) -> P:
        if problem := _problem(name, cls):
            raise RegistrationError(f"cannot register the policy {name!r}: {problem}")
        cls.name = name
        _POLICIES[name] = cls
        return cls

    return decorate


def _problem(name: str, cls: type) -> str | None:
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        return "a name is a lower-case identifier and no word of Python's own, like its module"
    if not (inspect.isclass(cls) and issubclass(cls, Policy)):
        return "the class must derive from tokenprune.integrations.hf.sessions.Policy"
    own = cls.__dict__.get("__dataclass_params__")  # not an inherited one: the class's own fields would not exist
    if own is None or not own.frozen:
        return "decorate the class with @dataclass(frozen=True) below @register_policy(...)"
    if not (cls.__dict__.get("__doc__") or "").strip() or (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        return "the class needs a docstring"
    present = _POLICIES.get(name)
    if present is not None and (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
        return f"the name is taken by {present.__module__}.{present.__qualname__}"
    return None


def _load() -> None:
    """Import our own policies and those that installed packages offer, once."""
    global _loaded
    if not _loaded:
        _loaded = True
        import_all("tokenprune.integrations.hf.sessions.policies", ENTRY_POINT_GROUP)


def available_policies() -> list[str]:
    """Return the names of all registered policies of sessions, sorted."""
    _load()
    return sorted(_POLICIES)


def policy(name: str, **options: Any) -> Policy:
    """Return a configured policy for `session(policy=...)`; raises UnknownPolicyError, or OptionError for its
    options."""
    _load()
    if not isinstance(name, str) or name not in _POLICIES:
        raise UnknownPolicyError(
            f"unknown policy {name!r}: {suggest_nearest(name, _POLICIES)}"
            "tokenprune.sessions.available_policies() lists them all"
        )
    return build_from_options(name, _POLICIES[name], options)


def policy_named(saved: Any) -> Policy:
    """Return the policy that a file names, {"name": ..., "options": {...}}; raises KeyError or TypeError for none."""
    return policy(saved["name"], **saved["options"])


def policy_of(given: Any) -> Policy:
    """Return the policy that `policy=` of a session means: a name, or a configured `Policy`."""
    if isinstance(given, str):
        return policy(given)
    if not isinstance(given, Policy):
        raise OptionError(
            f"policy={given!r} must be a name out of {available_policies()}, or a tokenprune.sessions.Policy"
        )
    if not given.name:
        raise OptionError(
            f"{type(given).__name__} is not registered: decorate it with @tokenprune.sessions.register_policy"
        )
    return given
