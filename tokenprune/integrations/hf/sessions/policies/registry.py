# SPDX-License-Identifier: Apache-2.0
"""Registry of session policies, with third-party entry points."""

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

    Third-party packages register their policies in the entry-point group `tokenprune.policies`.

    Args:
        name: Lower-case identifier.

    Raises:
        RegistrationError: If the name is not an identifier or already registered, or the class is not a documented
            frozen dataclass that derives from `Policy`.

    Examples:
        >>> from dataclasses import dataclass
        >>> @tokenprune.sessions.register_policy("latest")
        ... @dataclass(frozen=True)
        ... class Latest(tokenprune.sessions.Policy):
        ...     "Keep the latest visual tokens."
        ...
        ...     shared = True
        ...
        ...     def select(self, view, keep):
        ...         return torch.arange(view.count - keep, view.count)
        >>> tokenprune.sessions.policy("latest")
        latest()
    """

    def decorate(cls: P) -> P:
        if problem := _find_problem(name, cls):
            raise RegistrationError(f"cannot register the policy {name!r}: {problem}")
        cls.name = name
        _POLICIES[name] = cls
        return cls

    return decorate


def _find_problem(name: str, cls: type) -> str | None:
    if not name.isidentifier() or name != name.lower() or keyword.iskeyword(name):
        return "the name must be a lower-case identifier and not a Python keyword"
    if not (inspect.isclass(cls) and issubclass(cls, Policy)):
        return "the class must derive from tokenprune.integrations.hf.sessions.Policy"
    params = cls.__dict__.get("__dataclass_params__")  # inherited parameters would miss the fields of this class
    if params is None or not params.frozen:
        return "decorate the class with @dataclass(frozen=True) below @register_policy(...)"
    if not (cls.__dict__.get("__doc__") or "").strip() or (cls.__doc__ or "").startswith(f"{cls.__name__}("):
        return "the class needs a docstring"
    present = _POLICIES.get(name)
    if present is not None and (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
        return f"the name is taken by {present.__module__}.{present.__qualname__}"
    return None


def _load() -> None:
    """Import the built-in policies and the policies of installed packages, once."""
    global _loaded
    if not _loaded:
        _loaded = True
        import_all("tokenprune.integrations.hf.sessions.policies", ENTRY_POINT_GROUP)


def available_policies() -> list[str]:
    """Return the names of all registered session policies, sorted.

    Examples:
        >>> "window" in tokenprune.sessions.available_policies()
        True
    """
    _load()
    return sorted(_POLICIES)


def policy(name: str, **options: Any) -> Policy:
    """Return a configured policy for `session(policy=...)`.

    Args:
        name: Registered name.
        **options: Options of the policy.

    Raises:
        UnknownPolicyError: If the policy does not exist.
        OptionError: If an option is not valid.

    Examples:
        >>> tokenprune.sessions.policy("window", sink=16)
        window(sink=16)
    """
    _load()
    if not isinstance(name, str) or name not in _POLICIES:
        raise UnknownPolicyError(
            f"unknown policy {name!r}: {suggest_nearest(name, _POLICIES)}"
            "tokenprune.sessions.available_policies() lists all policies"
        )
    return build_from_options(name, _POLICIES[name], options)


def load_policy(saved: Any) -> Policy:
    """Return the policy of a saved session: {"name": ..., "options": {...}}. Raises KeyError or TypeError."""
    return policy(saved["name"], **saved["options"])


def resolve_policy(argument: Any) -> Policy:
    """Return the policy of a `policy=` argument: a name, or a configured `Policy`. Raises OptionError."""
    if isinstance(argument, str):
        return policy(argument)
    if not isinstance(argument, Policy):
        raise OptionError(
            f"policy={argument!r} must be a name from {available_policies()}, or a tokenprune.sessions.Policy"
        )
    if not argument.name:
        raise OptionError(
            f"{type(argument).__name__} is not registered. Decorate it with @tokenprune.sessions.register_policy."
        )
    return argument
