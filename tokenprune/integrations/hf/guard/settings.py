# SPDX-License-Identifier: Apache-2.0
"""Settings of the guard: the `guard=` argument of `tokenprune.patch`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError

# Kinds of questions that suffer first from pruning: reading and fine detail, locations, counting.
KINDS = ("text", "grounding", "counting")
MODES = ("warn", "auto", "off")
# An image with a larger text share (images.py) counts as text. docs/guides/guard.md describes how the limit was chosen.
TEXT_LIMIT = 0.25


def is_tokens(floor: Any) -> bool:
    """Return whether a floor is a number of tokens per image, not a share."""
    return isinstance(floor, int) and not isinstance(floor, bool) and floor > 1


@dataclass(frozen=True)
class Guard:
    """Guard of a patched model: `patch(..., guard=Guard(...))`. A string is a mode with the defaults.

    Args:
        mode: "warn" logs one warning for each reason, "auto" keeps more tokens for prompts at risk, "off" does nothing.
        patterns: Regular expressions (case-insensitive) that add to the built-in ones, by kind of question: "text",
            "grounding" or "counting".
        floors: Sufficient keep by kind of question, instead of the measured one: a share in (0, 1], or an int >= 2 for
            a number of tokens per image.
        text_limit: Text share above which an image counts as text, in (0, 1]. 1.0 disables the check of images.

    Raises:
        OptionError: If a value is not valid.

    Examples:
        >>> guard = tokenprune.Guard("warn", floors={"text": 0.6}, patterns={"counting": [r"wie ?viele"]})
        >>> model = tokenprune.patch(model, "divprune", keep=0.25, processor=processor, guard=guard)
        >>> ids = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).guard[0].raised
        False
    """

    mode: str = "warn"
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    floors: Mapping[str, float] = field(default_factory=dict)
    text_limit: float = TEXT_LIMIT

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise OptionError(f"guard={self.mode!r} is not valid. Use {', '.join(map(repr, MODES))} or a Guard(...).")
        hint = ", or an int >= 2 (tokens per image)"
        for name in ("patterns", "floors"):
            mapping = getattr(self, name)
            if not isinstance(mapping, Mapping) or set(mapping) - set(KINDS):
                raise OptionError(f"guard: {name} must be a dict with keys from {', '.join(KINDS)}, not {mapping!r}")
        for kind, patterns in self.patterns.items():
            if isinstance(patterns, str) or not isinstance(patterns, Sequence):
                raise OptionError(
                    f"guard: patterns of {kind!r} must be a list of regular expressions, not {patterns!r}"
                )
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except (re.error, TypeError) as error:
                    raise OptionError(f"guard: {pattern!r} is not a valid regular expression: {error}") from error
        shares = [item for item in self.floors.items() if not is_tokens(item[1])]
        for name, value in (*shares, ("text_limit", self.text_limit)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise OptionError(f"guard: {name}={value!r} must be a share in (0, 1]{hint if name in KINDS else ''}")

    @classmethod
    def from_argument(cls, value: Any) -> Guard:
        """Parse a `guard=` argument: a `Guard`, or a mode as a string. Raises OptionError."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, str):
            raise OptionError(f"guard={value!r} is not valid. Use {', '.join(map(repr, MODES))} or a Guard(...).")
        return cls(value)
