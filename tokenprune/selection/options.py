# SPDX-License-Identifier: Apache-2.0
"""Check option values of methods against the types of their dataclass fields, and describe these types.

    layer: Annotated[int, Ge(1)] = 2
    mode: Literal["evict", "mask"] = "evict"
    dense_layers: Sequence[Annotated[int, Ge(0)]] = ()

Supported types are bool, int, float (accepts int), str, `Literal`, `X | None`, `Sequence[X]` (a list or a tuple),
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
_DESCRIPTIONS = {
    bool: "True or False", int: "an int", float: "a number", str: "a string", types.NoneType: "None", Path: "a path",
    Callable: "a function",
}  # fmt: skip
_SEQUENCES: dict[Any, tuple[Any, str]] = {tuple: (tuple, "a tuple"), Sequence: ((list, tuple), "a list")}


def get_option_types(cls: type) -> dict[str, Any]:
    """Return the type of each option of a method class, including bounds.

    Raises:
        OptionError: If a type is imported under `TYPE_CHECKING` and cannot be resolved.
    """
    return _get_option_types(cast(Any, cls))  # mypy uses the `__hash__` of instances, not of the class


@cache
def _get_option_types(cls: Any) -> dict[str, Any]:
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise OptionError(
            f"{cls.__name__}: the option type {error.name} is not defined at run time. Import it outside of "
            "`if TYPE_CHECKING`."
        ) from error
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def check_options(method: Any) -> None:
    """Check the option values of a method, and convert lists to tuples so that the method is hashable.

    Raises:
        OptionError: If a value does not match the type of its field.
    """
    for name, hint in get_option_types(type(method)).items():
        value = getattr(method, name)
        if isinstance(value, list) and _is_sequence(hint) and matches_type(tuple(value), hint):
            object.__setattr__(method, name, tuple(value))
        elif not matches_type(value, hint):
            raise OptionError(f"{method.name}: {name}={value!r} must be {describe_type(hint)}")


def _is_sequence(hint: Any) -> bool:
    return get_origin(hint) in _SEQUENCES or any(map(_is_sequence, get_args(hint)))


def get_file_options(cls: type) -> set[str]:
    """Return the options that name a file: typed as a path, or declared with `field(metadata={"file": True})`."""
    fields = dataclasses.fields(cast(Any, cls))
    return {field.name for field in fields if field.metadata.get("file") or "Path" in str(field.type)}


def matches_type(value: Any, hint: Any) -> bool:
    """Return True if `value` has the type `hint` and is within its bounds.

    Booleans are not numbers, and NaN is out of range.

    Examples:
        >>> matches_type(2, Annotated[int, Ge(1)]), matches_type(True, int)
        (True, False)
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return matches_type(value, args[0]) and all(compare(value, limit) for _, compare, limit in _get_bounds(args))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return any(matches_type(value, arg) for arg in args)
    if origin in _SEQUENCES:
        return isinstance(value, _SEQUENCES[origin][0]) and all(matches_type(item, args[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    kind: Any = origin or hint
    return hint is Any or isinstance(value, kind)


def describe_type(hint: Any) -> str:
    """Return a description of a type for messages.

    Examples:
        >>> describe_type(Annotated[int, Ge(1)]), describe_type(Literal["evict", "mask"])
        ('an int >= 1', "'evict' or 'mask'")
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe_type(args[0]) + " and".join(f" {sign} {limit:g}" for sign, _, limit in _get_bounds(args))
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(map(repr, args[:-1])), repr(args[-1]))))
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, args))
    if origin in _SEQUENCES:
        return f"{_SEQUENCES[origin][1]}, each entry {describe_type(args[0])}"
    return _DESCRIPTIONS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _get_bounds(args: tuple[Any, ...]) -> list[tuple[str, Any, Any]]:
    """Return each bound of an `Annotated` type as (sign, comparison function, limit)."""
    flat = [item for arg in args[1:] for item in (arg if isinstance(arg, GroupedMetadata) else [arg])]
    bounds = [item for item in flat if isinstance(item, BaseMetadata) and type(item) in _BOUNDS]
    return [(*_BOUNDS[type(bound)], getattr(bound, type(bound).__name__.lower())) for bound in bounds]


__all__ = ["check_options", "describe_type", "get_file_options", "get_option_types", "matches_type"]


class CallRepr:
    """Base of dataclasses whose repr is a call with the options that differ from their defaults.

    Examples:
        >>> tokenprune.method("fastv", layer=3)
        fastv(layer=3)
    """

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `dataclass` adds a `__repr__` to each class that does not define one, so define the inherited one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = super(cls, cls).__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        options = [(field, getattr(self, field.name)) for field in dataclasses.fields(cast(Any, self)) if field.repr]
        changed = [f"{field.name}={value!r}" for field, value in options if not _is_default(field, value)]
        return f"{self.name or type(self).__qualname__}({', '.join(changed)})"


def _is_default(option: dataclasses.Field, value: Any) -> bool:
    default = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    if type(value) is not type(default):
        return False
    try:
        return bool(value == default)
    except (TypeError, ValueError, RuntimeError):  # the comparison of tensors and arrays is elementwise
        return False
