# SPDX-License-Identifier: Apache-2.0
"""Check that a setting contains only JSON values of bounded size and depth."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tokenprune.errors import BudgetError, OptionError, shorten

_MAX_TEXT = 2048  # characters of a string
_MAX_KEY = 100  # characters of a key
_MAX_VALUES = 1024  # total number of values
_MAX_DEPTH = 6  # nested lists and objects
_MAX_NUMBER = 2**63  # exclusive bound of the absolute value


def to_plain_json(value: Any, name: str) -> Any:
    """Return `value` with the types that `json.loads` returns.

    Args:
        value: Any value. Tuples become lists, and paths become strings.
        name: Name of the value in messages.

    Raises:
        OptionError: If the value is not JSON, too long or too deep, or contains a number that is not finite.
        BudgetError: If `name` is "keep" and a number is not finite or too large.
    """
    return _convert(value, name, _MAX_DEPTH, iter(range(_MAX_VALUES)))


def _convert(value: Any, name: str, max_depth: int, remaining: Iterator[int]) -> Any:
    if next(remaining, None) is None:
        raise OptionError(f"{name}: the setting has more than {_MAX_VALUES} values")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _convert_number(value, name)
    if isinstance(value, (str, os.PathLike)):
        text = value if isinstance(value, str) else os.fsdecode(value)
        if len(text) > _MAX_TEXT:
            raise OptionError(f"{name} has {len(text)} characters. The limit is {_MAX_TEXT}.")
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # a response that quotes it could not be encoded
            raise OptionError(f"{name} contains invalid Unicode: {shorten(text)}")
        return text
    if not isinstance(value, (list, tuple, Mapping)):
        raise OptionError(f"{name} must be a JSON value, not a {type(value).__name__}")
    if max_depth == 0:
        raise OptionError(f"{name}: lists and objects are nested more than {_MAX_DEPTH} levels deep")
    if not isinstance(value, Mapping):
        return [_convert(item, name, max_depth - 1, remaining) for item in value]
    converted = {}
    for key, item in value.items():
        if not isinstance(key, str) or len(key) > _MAX_KEY or not key.isprintable():
            raise OptionError(f"{name} must be an object whose keys are option names, not {shorten(key)}")
        converted[key] = _convert(item, key, max_depth - 1, remaining)
    return converted


def _convert_number(value: Any, name: str) -> float | int:
    if not -_MAX_NUMBER < value < _MAX_NUMBER:  # also true for NaN
        is_finite = value == value and abs(value) != math.inf
        problem = "is out of range: -2**63 to 2**63" if is_finite else f"must be a finite number, not {value}"
        raise (BudgetError if name == "keep" else OptionError)(f"{name} {problem}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)
