# SPDX-License-Identifier: Apache-2.0
"""Broken rules of methods and policies, as errors, and the rules that both keep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tokenprune.errors import ConformanceError

Kind = TypeVar("Kind")


def require(condition: Any, message: str | None) -> None:
    """Raise ConformanceError with `message` unless `condition`."""
    if not condition:
        raise ConformanceError(message)


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Raise what a method or policy does wrong, or fails with, as ConformanceError with its name."""
    try:
        yield
    except ConformanceError as error:
        raise ConformanceError(f"{name}: {error}") from error.__cause__
    except Exception as error:
        raise ConformanceError(f"{name} raises {type(error).__name__}: {error}") from error


def resolve_instance(given: Any, kind: type[Kind], registered: Callable[[str], Kind]) -> Kind:
    """Return an instance of a class of `kind`, of a registered name, or what is one; raises ConformanceError."""
    if isinstance(given, str):
        return registered(given)
    if inspect.isclass(given) and issubclass(given, kind):
        try:
            return given()
        except TypeError as error:
            raise ConformanceError(
                f"{given.__name__}() fails: {error}. Every option needs a default; or check an instance"
            ) from error
    if isinstance(given, kind):
        return given
    word = kind.__name__
    raise ConformanceError(f"{given!r} is neither the name of a {word.lower()}, nor a {word}, nor a class of them")


def check_dataclass(one: Any, decorator: str) -> None:
    """Raise ConformanceError unless a method or policy is a frozen dataclass with a docstring and a name."""
    cls = type(one)
    own = cls.__dict__.get("__dataclass_params__")
    require(own is not None and own.frozen, "decorate the class with @dataclass(frozen=True)")
    doc = (cls.__dict__.get("__doc__") or "").strip()
    require(doc and not doc.startswith(f"{cls.__name__}("), "its class needs a docstring")
    require(one.name, f"it has no name: decorate its class with @{decorator}(...)")
