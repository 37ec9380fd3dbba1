# SPDX-License-Identifier: Apache-2.0
"""Methods, their options and stacks on one line: "dart", "dart:pivot_text=0", "divprune+fastv:layer=3".

An option follows its method behind a colon, the next ones behind commas; a plus puts a method on top of another (a
stack, in which each acts at a place of its own). Lists of such settings have commas between them: what has an equals
sign belongs to the method before it. Brackets and double quotes hold together what stands in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenprune.base import Method
from tokenprune.config import Config
from tokenprune.errors import OptionError
from tokenprune.integrations.shared.composition import check_places
from tokenprune.options import fits, option_types
from tokenprune.registry import build, method_class
from tokenprune.setting import Entry, short

_OPTION = re.compile(r"\s*\w+\s*=")
_METHOD = re.compile(r"\s*[a-z_]")
_OPEN, _CLOSE = "[{(", "]})"
_CONSTANTS = {"True": True, "False": False, "None": None}


def split_methods(text: str) -> tuple[str, ...]:
    """Return the settings of a list, as they were written: "dart:pivot_text=0,pivot_image=8,tome" has two."""
    found: list[str] = []
    for part in _split(text, ","):
        if found and _OPTION.match(part):
            found[-1] += f",{part}"
        elif part.strip():
            found.append(part)
    return tuple(one.strip() for one in found)


def canonical_spec(text: str) -> str:
    """Return a setting in the one spelling that names it in tables and files, with nothing to guess.

    Raises UnknownMethodError, OptionError for options that a method does not take, or for methods at one place.
    """
    entries = _entries(text)
    check_places(Config(_setting(entries)).steps()[0])  # files that it names are read
    return "+".join(_spell(entry) for entry in entries)


def setting_of(
    text: str, keep: Any = None, defaults: Mapping[str, Mapping[str, Any]] | None = None, seed: int | None = None
) -> dict[str, Any]:
    """Return what `patch(config=...)` takes for a setting on one line.

    keep: one for all of its methods, or a list; None: each method's own. defaults: by method, options that it has where
    the line gives none. seed: of the methods that draw at random, where the line gives none.
    """
    entries = [_filled(entry, (defaults or {}).get(entry.name, {}), seed) for entry in _entries(text)]
    return _setting(entries) | ({} if keep is None else {"keep": keep})


def methods_of(text: str) -> list[Method]:
    """Return the methods of a setting on one line, with its options; raises like `canonical_spec`."""
    return Config(setting_of(text)).steps()[0]


def files_of(text: str) -> list[str]:
    """Return the options of a setting that name a file, as in "thresholds of dymu"; nothing is opened."""
    return [f"{name} of {entry.name}" for entry in _entries(text) for name in entry.files]


def draws_at_random(text: str) -> bool:
    """Return True if a method of the setting draws at random, with a seed that the line does not give."""
    return any(entry != _filled(entry, {}, 0) for entry in _entries(text))


def _filled(entry: Entry, defaults: Mapping[str, Any], seed: int | None) -> Entry:
    random = {} if seed is None or "seed" not in option_types(method_class(entry.name)) else {"seed": seed}
    return Entry(entry.name, {**random, **defaults, **entry.options})


def _setting(entries: list[Entry]) -> dict[str, Any]:
    several = [{"method": entry.name, **entry.options} for entry in entries]
    return several[0] if len(several) == 1 else {"method": several}


def _entries(text: str) -> list[Entry]:
    return [_entry(part, text) for part in _split(text, "+", before=_METHOD)]


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


def _spell(entry: Entry) -> str:
    options = []
    for name, value in entry.options.items():
        hint = option_types(method_class(entry.name)).get(name)
        plain = isinstance(value, str) and value.strip() == value and not re.search(r'[,+"\[\]{}()]', value)
        plain = plain and value_of(value, hint) == value
        options.append(f"{name}={value if plain else json.dumps(value, ensure_ascii=False)}")
    return entry.name + (":" + ",".join(options) if options else "")


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


__all__ = ["canonical_spec", "draws_at_random", "files_of", "methods_of", "setting_of", "split_methods", "value_of"]
