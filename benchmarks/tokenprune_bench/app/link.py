# SPDX-License-Identifier: Apache-2.0
"""The settings of a page as the query of its address, to share. What comes from an address is checked like any text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode

from tokenprune.errors import OptionError
from tokenprune_bench.app.snippets import LONGEST

KEYS = ("example", "question", "first", "second", "keep")
SMALLEST_KEEP = 0.05  # of the slider


@dataclass(frozen=True)
class Shared:
    """The settings that an address holds; None: it does not say. example: a number, from 1."""

    example: int | None = None
    question: str | None = None
    first: str | None = None
    second: str | None = None
    keep: float | None = None


def query(example: int | None, question: str, methods: Sequence[str], keep: float) -> str:
    """Return the query. A file of the user's own stays out of it, and the question about it."""
    first, second = (*methods, "", "")[:2]
    asked = {} if example is None else {"example": example, "question": question}
    return "?" + urlencode({**asked, "first": first, "second": second, "keep": f"{keep:g}"})


def read(params: Mapping[str, str], examples: int) -> Shared:
    """Return the settings of an address; raises OptionError. Methods are for `comparison.checked` to judge.

    examples: how many there are. Keys with two underscores belong to gradio.
    """
    given = {str(key): str(value) for key, value in params.items() if not str(key).startswith("__")}
    if unknown := sorted(set(given) - set(KEYS)):
        raise OptionError(f"the address has no {unknown[0][:40]!r}: it takes {', '.join(KEYS)}")
    if long := [key for key, value in given.items() if len(value) > LONGEST]:
        raise OptionError(f"{long[0]} in the address is too long: {LONGEST} characters at most")
    number = _number(given, "example")
    if number is not None and number not in range(1, examples + 1):
        raise OptionError(f"the address names example {given['example'][:40]!r}: there are 1 to {examples}")
    keep = _number(given, "keep")
    if keep is not None and not SMALLEST_KEEP <= keep <= 1:
        raise OptionError(f"keep={given['keep'][:40]} in the address: give a share from {SMALLEST_KEEP} to 1")
    return Shared(
        None if number is None else int(number), given.get("question"), given.get("first"), given.get("second"), keep
    )


def _number(given: Mapping[str, str], key: str) -> float | None:
    if key not in given:
        return None
    try:
        number = float(given[key])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise OptionError(f"{key}={given[key][:40]} in the address is no number")
    return number
