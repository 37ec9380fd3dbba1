# SPDX-License-Identifier: Apache-2.0
"""Split of the questions into a search part and a held-out part, and a check of their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenprune.errors import OptionError
from tokenprune_bench.tuning.promise import Promise, format_points

_PART = 3  # one image in three goes to the search: the held-out part limits how small a drop can be shown


def split_questions(groups: Sequence[Any], kinds: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Split question indices into a search part (about a third) and a held-out part, both in random order.

    Args:
        groups: Image sources of each question. Questions with equal sources stay together.
        kinds: Kind of each question. Both parts get a similar mix of kinds.
        seed: Seed of the order.
    """
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    rng = np.random.default_rng(seed)
    order = list(members.values())
    order = [order[index] for index in rng.permutation(len(order))]
    order.sort(key=lambda members: sorted(kinds[index] for index in members))
    parts: tuple[list[int], list[int]] = ([], [])
    for position, members in enumerate(order):
        parts[position % _PART != 0].extend(members)
    return tuple([part[index] for index in rng.permutation(len(part))] for part in parts)


def check_question_count(questions: int, promise: Promise, held_out: int | None = None) -> None:
    """Check that the number of questions suffices to prove the promise.

    Raises:
        OptionError: If even unchanged answers could not prove it.
    """
    held_out = questions - math.ceil(questions / _PART) if held_out is None else held_out
    needed = promise.questions_needed
    if held_out < needed:
        raise OptionError(
            f"{questions} questions are too few for a drop below {format_points(promise.max_drop)} at a confidence of "
            f"{100 * promise.confidence:g} %: {held_out} would be held out, but at least {needed} are needed. Use at "
            f"least {math.ceil(needed * _PART / (_PART - 1))} questions, better three times as many, or allow a larger "
            "drop."
        )


__all__ = ["check_question_count", "split_questions"]
