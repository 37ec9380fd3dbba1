# SPDX-License-Identifier: Apache-2.0
"""Settings of a page as the query of its address. Values from an address are untrusted and checked."""

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
    """Settings of an address. None: not given. `example` is a number from 1."""

    example: int | None = None
    question: str | None = None
    first: str | None = None
    second: str | None = None
    keep: float | None = None


def query(example: int | None, question: str, methods: Sequence[str], keep: float) -> str:
    """Return the query. It leaves out a user's file and the question about the file."""
    first, second = (*methods, "", "")[:2]
    asked = {} if example is None else {"example": example, "question": question}
    return "?" + urlencode({**asked, "first": first, "second": second, "keep": f"{keep:g}"})


def read(params: Mapping[str, str], examples: int) -> Shared:
    """Return the settings of an address. `comparison.parse_setting` checks the methods.

    Args:
        params: Query parameters. Keys with two underscores belong to gradio.
        examples: Number of examples.

    Raises:
        OptionError: If a key or a value is not valid.
    """
    values = {str(key): str(value) for key, value in params.items() if not str(key).startswith("__")}
    if unknown := sorted(set(values) - set(KEYS)):
        raise OptionError(f"The address has an unknown key {unknown[0][:40]!r}. Use {', '.join(KEYS)}.")
    if long := [key for key, value in values.items() if len(value) > LONGEST]:
        raise OptionError(f"{long[0]} in the address is too long. The maximum is {LONGEST} characters.")
    value = _number(values, "example")
    if value is not None and value not in range(1, examples + 1):
        raise OptionError(f"Example {values['example'][:40]!r} in the address does not exist. Use 1 to {examples}.")
    keep = _number(values, "keep")
    if keep is not None and not SMALLEST_KEEP <= keep <= 1:
        raise OptionError(f"keep={values['keep'][:40]} in the address is not valid. Use {SMALLEST_KEEP} to 1.")
    return Shared(
        None if value is None else int(value), values.get("question"), values.get("first"), values.get("second"), keep
    )


def _number(values: Mapping[str, str], key: str) -> float | None:
    if key not in values:
        return None
    try:
        value = float(values[key])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OptionError(f"{key}={values[key][:40]} in the address is not a number.")
    return value
