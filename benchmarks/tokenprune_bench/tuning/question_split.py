# SPDX-License-Identifier: Apache-2.0
"""The two parts of the questions, to search with and held out for the test, and whether they are enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenprune.errors import OptionError
from tokenprune_bench.tuning.promise import Promise, format_points

_PART = 3  # every third image is for the search: what is held out decides how small a drop can be shown


def split_questions(groups: Sequence[Any], kinds: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Return the numbers of the questions to search with, about a third, and of those to hold out, in random order.

    Questions about the same images (equal groups) stay together; images are divided evenly by the kinds asked.
    """
    members: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    rng = np.random.default_rng(seed)
    order = list(members.values())
    order = [order[index] for index in rng.permutation(len(order))]
    order.sort(key=lambda numbers: sorted(kinds[number] for number in numbers))
    parts: tuple[list[int], list[int]] = ([], [])
    for place, numbers in enumerate(order):
        parts[place % _PART != 0].extend(numbers)
    return tuple([part[index] for index in rng.permutation(len(part))] for part in parts)


def check_question_count(questions: int, promise: Promise, held_out: int | None = None) -> None:
    """Raise OptionError if so few questions cannot show that any candidate keeps the promise."""
    held_out = questions - math.ceil(questions / _PART) if held_out is None else held_out
    needed = promise.questions_needed
    if held_out < needed:
        raise OptionError(
            f"{questions} questions are too few for a drop below {format_points(promise.max_drop)} at a confidence of "
            f"{100 * promise.confidence:g} %: {held_out} of them would be held out, and it takes {needed} if not a "
            f"single answer changes. Ask at least {math.ceil(needed * _PART / (_PART - 1))}, better three times as "
            "many, or allow a larger drop"
        )


__all__ = ["check_question_count", "split_questions"]
