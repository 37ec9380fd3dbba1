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
from typing import Any

from tokenprune.errors import OptionError, shorten
from tokenprune.methods.registry import build, method_class
from tokenprune.selection.options import get_file_options, get_option_types, matches_type

_OPTION = re.compile(r"\s*\w+\s*=")
_METHOD = re.compile(r"\s*[a-z_]")
_OPEN, _CLOSE = "[{(", "]})"
_CONSTANTS = {"True": True, "False": False, "None": None}


def format_method(name: str, options: Mapping[str, Any]) -> str:
    """Return a method with its options on one line; `read_line` reads it."""
    types: Mapping[str, Any] = get_option_types(method_class(name)) if options else {}
    parts = []
    for option, value in options.items():
        plain = isinstance(value, str) and value.strip() == value and not re.search(r'[,+"\[\]{}()]', value)
        plain = plain and parse_value(value, types.get(option)) == value
        parts.append(f"{option}={value if plain else json.dumps(value, ensure_ascii=False)}")
    return name + (":" + ",".join(parts) if parts else "")


def split_methods(text: str) -> tuple[str, ...]:
    """Return the settings of a list, as they were written: "dart:pivot_text=0,pivot_image=8,tome" has two."""
    found: list[str] = []
    for part in _split(text, ","):
        if found and _OPTION.match(part):
            found[-1] += f",{part}"
        elif part.strip():
            found.append(part)
    return tuple(one.strip() for one in found)


def read_line(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the options of each method of a setting on one line; no file is opened.

    Raises:
        UnknownMethodError: If a method is not registered.
        OptionError: If a method does not take an option.
    """
    return [_read_method(part, text) for part in _split(text, "+", before=_METHOD)]


def _read_method(part: str, text: str) -> tuple[str, dict[str, Any]]:
    name, colon, rest = (one.strip() for one in part.partition(":"))
    if not name or "=" in name:
        raise OptionError(f"{shorten(text)}: write methods and their options as in 'divprune+fastv:layer=3,query=all'")
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
        options[key] = parse_value(value, get_option_types(cls).get(key))
    build(
        name, {} if options.keys() & get_file_options(cls) else options
    )  # raises for an unknown option or a wrong value
    return name, options


def parse_value(text: str, hint: Any) -> Any:
    """Return what a text means for an option of type `hint`: JSON, or Python's True, False and None, or else a text."""
    try:
        read = _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    asked = tuple(read) if isinstance(read, list) else read
    return (
        text
        if hint is not None and not (matches_type(read, hint) or matches_type(asked, hint)) and matches_type(text, hint)
        else read
    )


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
        raise OptionError(f"{shorten(text)}: a bracket or a quote is left open")
    return [*parts, text[start:]]


def parse_number(text: str) -> Any:
    """Return the number that a text of a command line means, whole numbers as int, or the text where it is none."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


__all__ = ["format_method", "parse_number", "parse_value", "read_line", "split_methods"]
