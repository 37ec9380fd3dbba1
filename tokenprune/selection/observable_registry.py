# SPDX-License-Identifier: Apache-2.0
"""The registry of observables: one decorator, lookup, and what the engines ask of a method's needs."""

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
RESERVED_NAMES: set[str] = set()  # attributes that `VisualTokens` has of itself
_loaded = False


def register_observable(name: str) -> Callable[[O], O]:
    """Register a class derived from `Observable` under `name`, the attribute by which methods read it.

    Raises RegistrationError for a name that is taken or no identifier, and for a class that says no `where` or has no
    docstring.
    """

    def decorate(cls: O) -> O:
        if problem := _problem(name, cls):
            raise RegistrationError(f"cannot register the observable {name!r}: {problem}")
        cls.name, cls.text_name = name, cls.__dict__.get("text_name") or name
        _OBSERVABLES[name] = cls()
        return cls

    return decorate


def _problem(name: str, cls: type) -> str | None:
    if not name.isidentifier() or name.startswith("_"):
        return "a name is an identifier that does not begin with an underscore"
    if not (inspect.isclass(cls) and issubclass(cls, Observable)):
        return "the class must derive from tokenprune.selection.Observable"
    if not isinstance(getattr(cls, "where", None), ObservedAt):
        return "the class must say `where` it is observed, out of tokenprune.selection.observable.ObservedAt"
    if unknown := set(cls.backends) - set(Backend):
        return f"unknown backends {sorted(map(str, unknown))}; known are {', '.join(Backend)}"
    if not (cls.__dict__.get("__doc__") or "").strip():
        return "the class needs a docstring"
    if name in RESERVED_NAMES:
        return "VisualTokens has an attribute of this name"
    present = type(_OBSERVABLES.get(name))
    if name in _OBSERVABLES and (present.__module__, present.__qualname__) != (cls.__module__, cls.__qualname__):
        return f"the name is taken by {present.__module__}.{present.__qualname__}"
    return None


def _load() -> None:
    """Import our own observables, once."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    ours = importlib.import_module("tokenprune.selection.observables")

    for module in pkgutil.iter_modules(ours.__path__):
        importlib.import_module(f"{ours.__name__}.{module.name}")


def available_observables() -> list[str]:
    """Return the names of all registered observables, sorted."""
    _load()
    return sorted(_OBSERVABLES)


def find_observable(name: str) -> Observable | None:
    """Return the observable registered under `name`, None if there is none."""
    _load()
    return _OBSERVABLES.get(name)


def get_observable(name: str) -> Observable:
    """Return the observable registered under `name`, or under the name that it has in the text after an image
    ("text.keys"); raise RegistrationError if there is none."""
    (found,) = select_observables([resolve_need(name)])
    return found


def find_text_observable(name: str) -> Observable | None:
    """Return the observable that the text after an image has under `name`, None if there is none."""
    _load()
    return next((one for one in _OBSERVABLES.values() if one.text_name == name), None)


def resolve_need(name: str) -> str:
    """Return the name of the observable that a need means, which may be written as it is read: "text.embeddings", or
    "text_embeddings", is what the text after an image has of "embeddings"."""
    _load()
    of_text = next((name.removeprefix(start) for start in ("text.", "text_") if name.startswith(start)), None)
    if name in _OBSERVABLES or of_text is None:
        return name
    found = find_text_observable(of_text)
    return name if found is None else found.name


def select_observables(needs: Iterable[str], *where: ObservedAt) -> list[Observable]:
    """Return those of `needs` that are observed at one of the places `where` (anywhere, if none is given), sorted by
    name; raise RegistrationError for an unknown one."""
    _load()
    if unknown := sorted(set(needs) - set(_OBSERVABLES)):
        raise RegistrationError(f"unknown needs {unknown}; known are {available_observables()}")
    found = [_OBSERVABLES[name] for name in sorted(needs)]
    return [one for one in found if not where or one.where in where]


def compares_frames(method: Any) -> bool:
    """Return True for a method that reads which frame of a video tokens are of, and so acts on videos alone."""
    return method is not None and bool(select_observables(method.needs, ObservedAt.FRAMES))


def list_unserved(needs: Iterable[str], backend: Backend) -> list[str]:
    """Return those of `needs` that `backend` does not serve, sorted."""
    return [one.name for one in select_observables(needs) if backend not in one.backends]


def list_served(backend: Backend) -> list[str]:
    """Return the names of the observables, to be declared, that `backend` serves."""
    return [name for name in available_observables() if backend in (one := _OBSERVABLES[name]).backends
            and one.where is not ObservedAt.CUT]  # fmt: skip


def suggest_names(name: str) -> str:
    """Return the start of a sentence that offers observables spelled almost like `name`, empty if none is."""
    close = difflib.get_close_matches(name, available_observables(), n=2, cutoff=0.75)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""
