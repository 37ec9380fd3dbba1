# SPDX-License-Identifier: Apache-2.0
"""Values that JSON can hold, of bounded size and depth: all that a setting is made of."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterator, Mapping
from typing import Any

from tokenprune.errors import BudgetError, OptionError, shorten

_LONGEST = 2048  # characters of a text
_LONGEST_NAME = 100  # characters of a key
_MOST = 1024  # values in all
_DEEPEST = 6  # lists and objects within each other
_LARGEST = 2**63  # no number is larger


def to_plain_json(value: Any, name: str) -> Any:
    """Return `value` as json.loads would have made it; `name` is what messages call it. Raises OptionError, or
    BudgetError of "keep", for what JSON cannot hold, or what is too long, too deep or no finite number."""
    return _plain(value, name, _DEEPEST, iter(range(_MOST)))


def _plain(value: Any, name: str, deeper: int, left: Iterator[int]) -> Any:
    if next(left, None) is None:
        raise OptionError(f"{name}: there are more than {_MOST} values in this setting")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return _number(value, name)
    if isinstance(value, (str, os.PathLike)):
        text = value if isinstance(value, str) else os.fsdecode(value)
        if len(text) > _LONGEST:
            raise OptionError(f"{name} is {len(text)} characters long; at most {_LONGEST} are read")
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # an answer that quoted it could not be sent
            raise OptionError(f"{name} is no text: {shorten(text)}")
        return text
    if not isinstance(value, (list, tuple, Mapping)):
        raise OptionError(f"{name} must be what JSON can hold: a {type(value).__name__} is nothing of that")
    if deeper == 0:
        raise OptionError(f"{name}: lists and objects stand more than {_DEEPEST} deep in each other")
    if not isinstance(value, Mapping):
        return [_plain(one, name, deeper - 1, left) for one in value]
    made = {}
    for key, one in value.items():
        if not isinstance(key, str) or len(key) > _LONGEST_NAME or not key.isprintable():
            raise OptionError(f"{name} must be an object whose keys are names of options, not {shorten(key)}")
        made[key] = _plain(one, key, deeper - 1, left)
    return made


def _number(value: Any, name: str) -> float | int:
    if not -_LARGEST < value < _LARGEST:  # neither is NaN
        odd = value != value or abs(value) == math.inf
        problem = f"must be a number that is finite, not {value}" if odd else "is beyond what is read, -2**63 to 2**63"
        raise (BudgetError if name == "keep" else OptionError)(f"{name} {problem}")
    return int(value) if isinstance(value, numbers.Integral) else float(value)
