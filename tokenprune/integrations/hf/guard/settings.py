# SPDX-License-Identifier: Apache-2.0
"""Settings of the guard, as `patch(guard=...)` takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError

# What a method may lose while the rest holds: reading and fine detail, telling things apart by where they are, numbers.
KINDS = ("text", "grounding", "counting")
MODES = ("warn", "auto", "off")
# An image whose measure (images.py) is above this is full of text: docs/guides/guard.md has how it was found.
TEXT_LIMIT = 0.25


def is_tokens(floor: Any) -> bool:
    """Return whether a floor is a number of an image's tokens, not a share of them."""
    return isinstance(floor, int) and not isinstance(floor, bool) and floor > 1


@dataclass(frozen=True)
class Guard:
    """The guard of a patched model: `patch(..., guard=Guard(...))`; a mode alone may be given as a string.

    mode:       "warn": log one warning for each reason; "auto": keep more tokens where there is one; "off".
    patterns:   kind -> regular expressions (any case) that mark a prompt as of that kind, beside those that are built
                in. Kinds: "text", "grounding", "counting".
    floors:     kind -> what is enough, in place of what was measured of any method: a share of an image's tokens in
                (0, 1], or an int >= 2, tokens of an image, whatever its size.
    text_limit: how much an image must look like text, above 0 and up to 1, to count as text; 1.0: none does.

    Raises OptionError for anything else.
    """

    mode: str = "warn"
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    text_limit: float = TEXT_LIMIT

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"guard={self.mode!r} is not known: use {', '.join(map(repr, MODES))} or a Guard(...)")
        hint = ", or an int >= 2, tokens of an image"
        for name in ("patterns", "floors"):
            given = getattr(self, name)
            if not isinstance(given, Mapping) or set(given) - set(KINDS):
                raise OptionError(f"guard: {name} must be a dict with keys out of {', '.join(KINDS)}, not {given!r}")
        for kind, patterns in self.patterns.items():
            if isinstance(patterns, str) or not isinstance(patterns, Sequence):
                raise OptionError(
                    f"guard: patterns of {kind!r} must be a list of regular expressions, not {patterns!r}"
                )
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (re.error, TypeError) as error:
                    raise OptionError(f"guard: {pattern!r} is no regular expression: {error}") from error
        shares = [item for item in self.floors.items() if not is_tokens(item[1])]
        for name, value in (*shares, ("text_limit", self.text_limit)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise OptionError(f"guard: {name}={value!r} must be a share in (0, 1]{hint if name in KINDS else ''}")

    @classmethod
    def of(cls, value: Any) -> Guard:
        """Return a mode as a Guard, or a Guard already; raises OptionError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise OptionError(f"guard={value!r} is not known: use {', '.join(map(repr, MODES))} or a Guard(...)")
        return cls(value)
