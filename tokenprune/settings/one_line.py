# SPDX-License-Identifier: Apache-2.0
"""Methods and their options on one line, as command lines, tables and files name them.

"dart", "dart:pivot_text=0", "divprune+fastv:layer=3": an option follows its method after a colon, the next ones after
commas; a plus puts a method on top of another (a stack, in which each acts at a place of its own). Lists of such
settings have commas between them: what has an equals sign belongs to the method before it. Brackets and double quotes
hold together what stands in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError, short
from tokenprune.methods.registry import build, method_class
from tokenprune.selection.options import file_options, fits, option_types

_OPTION = re.compile(r"\s*\w+\s*=")
_METHOD = re.compile(r"\s*[a-z_]")
_OPEN, _CLOSE = "[{(", "]})"
_CONSTANTS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class Entry:
    """A method of a setting, by its name, and the options that were given for it."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """Its options that name a file."""
        return [name for name in self.options if name in file_options(method_class(self.name))]

    @property
    def spec(self) -> str:
        """The entry on one line, with nothing to guess."""
        options = []
        for name, value in self.options.items():
            hint = option_types(method_class(self.name)).get(name)
            plain = isinstance(value, str) and value.strip() == value and not re.search(r'[,+"\[\]{}()]', value)
            plain = plain and value_of(value, hint) == value
            options.append(f"{name}={value if plain else json.dumps(value, ensure_ascii=False)}")
        return self.name + (":" + ",".join(options) if options else "")

    @property
    def draws_at_random(self) -> bool:
        """True if its method draws at random, with a seed that is not given."""
        return "seed" in option_types(method_class(self.name)) and "seed" not in self.options

    def filled(self, defaults: Mapping[str, Any], seed: int | None = None) -> Entry:
        """Return the entry with options for which it has none. seed: of a method that draws at random."""
        random = {"seed": seed} if seed is not None and self.draws_at_random else {}
        return Entry(self.name, {**random, **defaults, **self.options})


def split_methods(text: str) -> tuple[str, ...]:
    """Return the settings of a list, as they were written: "dart:pivot_text=0,pivot_image=8,tome" has two."""
    found: list[str] = []
    for part in _split(text, ","):
        if found and _OPTION.match(part):
            found[-1] += f",{part}"
        elif part.strip():
            found.append(part)
    return tuple(one.strip() for one in found)


def read_entries(text: str) -> tuple[Entry, ...]:
    """Return the methods of a setting on one line; nothing is opened.

    Raises UnknownMethodError, or OptionError for options that a method does not take.
    """
    return tuple(_entry(part, text) for part in _split(text, "+", before=_METHOD))


def _entry(part: str, text: str) -> Entry:
    name, colon, rest = (one.strip() for one in part.partition(":"))
    if not name or "=" in name:
        raise OptionError(f"{short(text)}: write methods and their options as in 'divprune+fastv:layer=3,query=all'")
    cls = method_class(name)
    options: dict[str, Any] = {}
    for one in _split(rest, ",") if colon else ():
        key, equals, value = (each.strip() for each in one.partition("="))
        if not equals or not key or not value:
            raise OptionError(f"{text!r}: {one.strip()!r} is no option: write it as in '{name}:option=value'")
        if key == "keep":
            raise OptionError(f"{text!r}: keep is no option of a method: give it with --keep")
        if key in options:
            raise OptionError(f"{text!r}: {key} of {name} stands there twice")
        options[key] = value_of(value, option_types(cls).get(key))
    build(name, options if not Entry(name, options).files else {})  # an option or value that is not taken is said here
    return Entry(name, options)


def value_of(text: str, hint: Any) -> Any:
    """Return what a text means for an option of type `hint`: JSON, or Python's True, False and None, or else a text."""
    try:
        read = _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    asked = tuple(read) if isinstance(read, list) else read
    return text if hint is not None and not (fits(read, hint) or fits(asked, hint)) and fits(text, hint) else read


def _split(text: str, sign: str, before: re.Pattern[str] | None = None) -> list[str]:
    """Cut a text at a sign that stands in no brackets or quotes. before: what must follow a sign that cuts."""
    parts, start, depth, quoted = [], 0, 0, False
    for place, letter in enumerate(text):
        if quoted:
            quoted = letter != '"' or text[place - 1] == "\\"
        elif letter == '"':
            quoted = True
        elif letter in _OPEN + _CLOSE:
            depth += 1 if letter in _OPEN else -1
        elif letter == sign and depth == 0 and (before is None or before.match(text, place + 1)):
            parts.append(text[start:place])
            start = place + 1
    if quoted or depth:
        raise OptionError(f"{short(text)}: a bracket or a quote is left open")
    return [*parts, text[start:]]


def number(text: str) -> Any:
    """Return the number that a text of a command line means, whole numbers as int, or the text where it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


__all__ = ["Entry", "number", "read_entries", "split_methods", "value_of"]
