# SPDX-License-Identifier: Apache-2.0
"""Read and format methods with their options on one line, for command lines, tables and files.

Examples are "dart", "dart:pivot_text=0" and "divprune+fastv:layer=3". Options follow the method after a colon, with
commas between them. A plus combines methods. In a list, commas separate settings: a part with an equals sign is an
option of the method before it. Brackets and double quotes protect the text inside them.
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
    """Return a method with its options on one line. `read_line` is the inverse."""
    types: Mapping[str, Any] = get_option_types(method_class(name)) if options else {}
    parts = []
    for option, value in options.items():
        is_plain = isinstance(value, str) and value.strip() == value and not re.search(r'[,+"\[\]{}()]', value)
        is_plain = is_plain and parse_value(value, types.get(option)) == value
        parts.append(f"{option}={value if is_plain else json.dumps(value, ensure_ascii=False)}")
    return name + (":" + ",".join(parts) if parts else "")


def split_methods(text: str) -> tuple[str, ...]:
    """Split a list of settings.

    Examples:
        >>> split_methods("dart:pivot_text=0,pivot_image=8,tome")
        ('dart:pivot_text=0,pivot_image=8', 'tome')
    """
    settings: list[str] = []
    for part in _split(text, ","):
        if settings and _OPTION.match(part):
            settings[-1] += f",{part}"
        elif part.strip():
            settings.append(part)
    return tuple(setting.strip() for setting in settings)


def read_line(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and the options of each method of a setting. Files that options name are not opened.

    Raises:
        UnknownMethodError: If a method is not registered.
        OptionError: If an option is unknown or invalid.

    Examples:
        >>> read_line("divprune+fastv:layer=3")
        [('divprune', {}), ('fastv', {'layer': 3})]
    """
    return [_read_method(part, text) for part in _split(text, "+", before=_METHOD)]


def _read_method(part: str, text: str) -> tuple[str, dict[str, Any]]:
    name, colon, rest = (piece.strip() for piece in part.partition(":"))
    if not name or "=" in name:
        raise OptionError(f"{shorten(text)} is not a setting. Write it as in 'divprune+fastv:layer=3,query=all'.")
    cls = method_class(name)
    options: dict[str, Any] = {}
    for option in _split(rest, ",") if colon else ():
        key, equals, value = (piece.strip() for piece in option.partition("="))
        if not equals or not key or not value:
            raise OptionError(f"{text!r}: {option.strip()!r} is not an option. Write it as in '{name}:option=value'.")
        if key == "keep":
            raise OptionError(f"{text!r}: keep is not an option of a method. Pass it as --keep.")
        if key in options:
            raise OptionError(f"{text!r}: {key} of {name} is set twice.")
        options[key] = parse_value(value, get_option_types(cls).get(key))
    build(name, {} if options.keys() & get_file_options(cls) else options)  # raises if an option is unknown or invalid
    return name, options


def parse_value(text: str, hint: Any) -> Any:
    """Return the value of an option: JSON, True, False, None, or the text itself.

    Args:
        text: Text of the value.
        hint: Type of the option. A text that only matches as a string is not parsed.
    """
    try:
        value = _CONSTANTS[text] if text in _CONSTANTS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    if hint is None:
        return value
    as_tuple = tuple(value) if isinstance(value, list) else value
    is_valid = matches_type(value, hint) or matches_type(as_tuple, hint)
    return text if not is_valid and matches_type(text, hint) else value


def _split(text: str, sign: str, before: re.Pattern[str] | None = None) -> list[str]:
    """Split a text at a separator outside of brackets and quotes.

    Args:
        text: Text to split.
        sign: Separator, one character.
        before: Pattern that must match after a separator.
    """
    parts, start, depth, is_quoted = [], 0, 0, False
    for index, letter in enumerate(text):
        if is_quoted:
            is_quoted = letter != '"' or text[index - 1] == "\\"
        elif letter == '"':
            is_quoted = True
        elif letter in _OPEN + _CLOSE:
            depth += 1 if letter in _OPEN else -1
        elif letter == sign and depth == 0 and (before is None or before.match(text, index + 1)):
            parts.append(text[start:index])
            start = index + 1
    if is_quoted or depth:
        raise OptionError(f"{shorten(text)}: a bracket or a quote is not closed.")
    return [*parts, text[start:]]


def parse_number(text: str) -> Any:
    """Return the int or float that a text contains, or the text if it contains no number."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


__all__ = ["format_method", "parse_number", "parse_value", "read_line", "split_methods"]
