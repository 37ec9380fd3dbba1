# SPDX-License-Identifier: Apache-2.0
"""Helpers of the conformance checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tokenprune.errors import ConformanceError

Kind = TypeVar("Kind")


def require(condition: Any, message: str | None) -> None:
    """Raise ConformanceError with `message` unless `condition` is true."""
    if not condition:
        raise ConformanceError(message)


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Re-raise errors of a method or policy as ConformanceError, prefixed with its name."""
    try:
        yield
    except ConformanceError as error:
        raise ConformanceError(f"{name}: {error}") from error.__cause__
    except Exception as error:
        raise ConformanceError(f"{name} raises {type(error).__name__}: {error}") from error


def resolve_instance(method: Any, kind: type[Kind], registered: Callable[[str], Kind]) -> Kind:
    """Return an instance of `kind` from an instance, a class or a registered name. Raises ConformanceError."""
    if isinstance(method, str):
        return registered(method)
    if inspect.isclass(method) and issubclass(method, kind):
        try:
            return method()
        except TypeError as error:
            raise ConformanceError(
                f"{method.__name__}() fails: {error}. Give every option a default, or pass an instance."
            ) from error
    if isinstance(method, kind):
        return method
    word = kind.__name__
    raise ConformanceError(f"{method!r} is neither a registered name, nor a {word}, nor a subclass of {word}")


def check_dataclass(instance: Any, decorator: str) -> None:
    """Raise ConformanceError unless a method or policy is a frozen dataclass with a docstring and a name."""
    cls = type(instance)
    params = cls.__dict__.get("__dataclass_params__")
    require(params is not None and params.frozen, "decorate the class with @dataclass(frozen=True)")
    doc = (cls.__dict__.get("__doc__") or "").strip()
    require(doc and not doc.startswith(f"{cls.__name__}("), "the class needs a docstring")
    require(instance.name, f"the name is missing. Decorate the class with @{decorator}(...).")
