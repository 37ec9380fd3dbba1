# SPDX-License-Identifier: Apache-2.0
"""Registry of observables: the decorator, and the lookups that engines use."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from tokenprune.errors import RegistrationError
from tokenprune.selection.observable import Backend, Observable, ObservedAt

O = TypeVar("O", bound=type[Observable])  # noqa: E741

_OBSERVABLES: dict[str, Observable] = {}
RESERVED_NAMES: set[str] = set()  # attributes of `VisualTokens` that are not observables
_is_loaded = False


def register_observable(name: str) -> Callable[[O], O]:
    """Register a subclass of `Observable`. Methods read it as the attribute `name` of their `VisualTokens`.

    Raises:
        RegistrationError: If the name is taken or not an identifier, or the class lacks `where` or a docstring.

    Examples:
        >>> from tokenprune.selection import ObservedAt, PerToken, register_observable
        >>> @register_observable("hidden")
        ... class Hidden(PerToken):
        ...     '''Hidden states at the cut.'''
        ...     where = ObservedAt.CUT
        Traceback (most recent call last):
        tokenprune.errors.RegistrationError: Cannot register the observable 'hidden': ...
    """

    def decorate(cls: O) -> O:
        if problem := _find_problem(name, cls):
            raise RegistrationError(f"Cannot register the observable {name!r}: {problem}.")
        cls.name, cls.text_name = name, cls.__dict__.get("text_name") or name
        _OBSERVABLES[name] = cls()
        return cls

    return decorate


def _find_problem(name: str, cls: type) -> str | None:
    if not name.isidentifier() or name.startswith("_"):
        return "a name must be an identifier without a leading underscore"
    if not (inspect.isclass(cls) and issubclass(cls, Observable)):
        return "the class must derive from tokenprune.selection.Observable"
    if not isinstance(getattr(cls, "where", None), ObservedAt):
        return "the class must set `where` to a member of tokenprune.selection.ObservedAt"
    if unknown := set(cls.backends) - set(Backend):
        return f"unknown backends {sorted(map(str, unknown))}, not among {', '.join(Backend)}"
    if not (cls.__dict__.get("__doc__") or "").strip():
        return "the class needs a docstring"
    if name in RESERVED_NAMES:
        return "VisualTokens already has an attribute of this name"
    present = type(_OBSERVABLES.get(name))
    if name in _OBSERVABLES and (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
        return f"the name is taken by {present.__module__}.{present.__qualname__}"
    return None


def _load() -> None:
    """Import the built-in observables, once."""
    global _is_loaded
    if _is_loaded:
        return
    _is_loaded = True
    package = importlib.import_module("tokenprune.selection.observables")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def available_observables() -> list[str]:
    """Return the names of all registered observables, sorted.

    Examples:
        >>> available_observables()[:2]
        ['embeddings', 'encoder_attention']
    """
    _load()
    return sorted(_OBSERVABLES)


def find_observable(name: str) -> Observable | None:
    """Return the observable registered as `name`, or None."""
    _load()
    return _OBSERVABLES.get(name)


def get_observable(name: str) -> Observable:
    """Return the observable registered as `name`, or read as `name` from the text, such as "text.keys".

    Raises:
        RegistrationError: If there is no such observable.
    """
    (observable,) = select_observables([resolve_need(name)])
    return observable


def find_text_observable(name: str) -> Observable | None:
    """Return the observable that text tokens provide as `name`, or None."""
    _load()
    return next((observable for observable in _OBSERVABLES.values() if observable.text_name == name), None)


def resolve_need(name: str) -> str:
    """Return the registered name of an entry of `needs`.

    An entry may be written as it is read: "text.embeddings" and "text_embeddings" resolve to "embeddings".
    """
    _load()
    text_name = next((name.removeprefix(prefix) for prefix in ("text.", "text_") if name.startswith(prefix)), None)
    if name in _OBSERVABLES or text_name is None:
        return name
    observable = find_text_observable(text_name)
    return name if observable is None else observable.name


def select_observables(needs: Iterable[str], *where: ObservedAt) -> list[Observable]:
    """Return the observables of `needs` that are observed at one of `where`, sorted by name.

    Args:
        needs: Names of observables.
        where: Modules or tensors to select. Empty: all.

    Raises:
        RegistrationError: If a name is not registered.
    """
    _load()
    if unknown := sorted(set(needs) - set(_OBSERVABLES)):
        hint = suggest_names(unknown[0]) or "See tokenprune.selection.available_observables()."
        raise RegistrationError(f"unknown needs {unknown}. {hint}")
    observables = [_OBSERVABLES[name] for name in sorted(needs)]
    return [observable for observable in observables if not where or observable.where in where]


def compares_frames(method: Any) -> bool:
    """Return True if a method reads the frames of videos. Such a method supports only videos."""
    return method is not None and bool(select_observables(method.needs, ObservedAt.FRAMES))


def list_unserved(needs: Iterable[str], backend: Backend) -> list[str]:
    """Return the names in `needs` that `backend` does not provide, sorted."""
    return [observable.name for observable in select_observables(needs) if backend not in observable.backends]


def list_served(backend: Backend) -> list[str]:
    """Return the names of the observables that `backend` provides and a method must declare, sorted."""
    return [name for name in available_observables() if backend in (observable := _OBSERVABLES[name]).backends
            and observable.where is not ObservedAt.CUT]  # fmt: skip


def suggest_names(name: str) -> str:
    """Return "Did you mean ...?" with similar names of observables, or an empty string."""
    close = difflib.get_close_matches(name, available_observables(), n=2, cutoff=0.75)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
