# SPDX-License-Identifier: Apache-2.0
"""The types of a method's options, as its fields declare them: checked in one place, and described in words.

    layer: Annotated[int, Ge(1)] = 2
    mode: Literal["evict", "mask"] = "evict"
    dense_layers: Sequence[Annotated[int, Ge(0)]] = ()

Understood are bool, int, float (also given as an int), str, `Literal`, `X | None`, `Sequence[X]` (a list or a tuple),
`tuple[X, ...]`, `Annotated` with bounds of annotated_types (Ge, Gt, Le, Lt), and any other class.
"""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, GroupedMetadata, Gt, Le, Lt

from tokenprune.errors import OptionError

_BOUNDS = {Ge: (">=", operator.ge), Gt: (">", operator.gt), Le: ("<=", operator.le), Lt: ("<", operator.lt)}
_WORDS = {
    bool: "True or False", int: "an int", float: "a number", str: "a text", types.NoneType: "None", Path: "a path",
    Callable: "a function",
}  # fmt: skip
_MANY: dict[Any, tuple[Any, str]] = {tuple: (tuple, "a tuple"), Sequence: ((list, tuple), "a list")}


def get_option_types(cls: type) -> dict[str, Any]:
    """Return the declared type of each option of a method's class, with its bounds."""
    return _option_types(cast(Any, cls))  # of classes mypy reads the hash of their instances


@cache
def _option_types(cls: Any) -> dict[str, Any]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise OptionError(
            f"{cls.__name__}: the type {error.name} of an option is not there when the code runs: import it outside of "
            "`if TYPE_CHECKING`"
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_options(method: Any) -> None:
    """Raise OptionError for an option of a configured method whose value is not of the type that its field declares.
    A list of an option that is a sequence becomes a tuple, so that it can be hashed, and is equal whoever made it."""
    for name, hint in get_option_types(type(method)).items():
        value = getattr(method, name)
        if isinstance(value, list) and _is_sequence(hint) and matches_type(tuple(value), hint):
            object.__setattr__(method, name, tuple(value))
        elif not matches_type(value, hint):
            raise OptionError(f"{method.name}: {name}={value!r} must be {describe_type(hint)}")


def _is_sequence(hint: Any) -> bool:
    return get_origin(hint) in _MANY or any(map(_is_sequence, get_args(hint)))


def get_file_options(cls: type) -> set[str]:
    """Return the options of a method that name a file: those with `field(metadata={"file": True})`, and those that
    are typed as a path."""
    fields = dataclasses.fields(cast(Any, cls))
    return {one.name for one in fields if one.metadata.get("file") or "Path" in str(one.type)}


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type, and within its bounds. True is no number, and NaN is within no bounds."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return matches_type(value, parts[0]) and all(holds(value, bound) for _, holds, bound in _bounds(parts))
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in parts)
    if origin in (Union, types.UnionType):
        return any(matches_type(value, part) for part in parts)
    if origin in _MANY:
        return isinstance(value, _MANY[origin][0]) and all(matches_type(one, parts[0]) for one in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    kind: Any = origin or hint
    return hint is Any or isinstance(value, kind)


def describe_type(hint: Any) -> str:
    """Return what a type allows: "an int >= 1", "'evict' or 'mask'", "a list, each entry an int"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_type(parts[0]) + " and".join(f" {sign} {bound:g}" for sign, _, bound in _bounds(parts))
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(map(repr, parts[:-1])), repr(parts[-1]))))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, parts))
    if origin in _MANY:
        return f"{_MANY[origin][1]}, each entry {describe_type(parts[0])}"
    return _WORDS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _bounds(parts: tuple[Any, ...]) -> list[tuple[str, Any, Any]]:
    """Return each bound of an `Annotated` as its sign, what compares with it, and the limit."""
    flat = [one for part in parts[1:] for one in (part if isinstance(part, GroupedMetadata) else [part])]
    found = [one for one in flat if isinstance(one, BaseMetadata) and type(one) in _BOUNDS]
    return [(*_BOUNDS[type(one)], getattr(one, type(one).__name__.lower())) for one in found]


__all__ = ["check_options", "describe_type", "get_file_options", "get_option_types", "matches_type"]


class CallRepr:
    """Base of dataclasses whose repr is `name(option=value, ...)`, with those options alone that differ from their
    defaults."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass writes a repr of its own into every class that does not have one there: hand it the inherited one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = super(cls, cls).__repr__  # type: ignore[method-assign]  # that is its purpose

    def __repr__(self) -> str:
        options = [(one, getattr(self, one.name)) for one in dataclasses.fields(cast(Any, self)) if one.repr]
        given = [f"{one.name}={value!r}" for one, value in options if not _is_default(one, value)]
        return f"{self.name or type(self).__qualname__}({', '.join(given)})"


def _is_default(option: dataclasses.Field, value: Any) -> bool:
    default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    if type(value) is not type(default):
        return False
    try:
        return bool(value == default)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors are not equal as a whole
        return False
