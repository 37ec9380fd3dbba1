# SPDX-License-Identifier: Apache-2.0
"""Budgets by age: older images of a prompt keep fewer tokens.

Ages change in steps, so that a prefix cache stays valid between steps.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenprune.errors import BudgetError

Tiers = tuple[tuple[int, float | int], ...]


@dataclass(frozen=True)
class Ages:
    """Budget of images by age.

    Args:
        tiers: Pairs (age, kept), ascending by age.
        step: Ages are recounted when the number of images is a multiple of it.

    Raises:
        BudgetError: If a tier is invalid.

    Examples:
        >>> apply_ages([100, 100, 100], Ages(((0, 1.0), (2, 0.5))).tiers, step=1)
        [50, 100, 100]
    """

    tiers: Tiers
    step: int = 1

    def __post_init__(self) -> None:
        if not _is_integer(self.step) or self.step < 1:
            raise BudgetError(f"step={self.step!r} must be a number of images, an int >= 1.")
        if self.tiers is None:
            raise BudgetError(f"step={self.step} requires age=. Pass age=, or leave out step.")
        vars(self).update(tiers=_read_tiers(self.tiers))

    @property
    def keeps_all(self) -> bool:
        """True if images of all ages keep their full budget."""
        return all(kept == 1.0 and isinstance(kept, float) for _, kept in self.tiers)


def _read_tiers(age: Any) -> Tiers:
    try:
        pairs = [tuple(pair) for pair in age]
    except TypeError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise BudgetError(f"age={age!r} must be pairs of an age and a kept share or number, as ((0, 1.0), (2, 0.5)).")
    tiers: Tiers = tuple((_read_age(pair), _read_kept(pair)) for pair in pairs)
    if tiers[0] != (0, 1.0):
        raise BudgetError(f"age={age!r} starts with {pairs[0]}. The first pair must be (0, 1.0), for the newest image.")
    for (earlier, more), (later, less) in pairwise(tiers):
        if later <= earlier:
            raise BudgetError(f"age: ages must increase, but {(later, less)} follows {(earlier, more)}.")
        if type(less) is type(more) and less > more:
            raise BudgetError(f"age: {(later, less)} keeps more than {(earlier, more)}, a newer image.")
    return tiers


def _read_age(pair: tuple[Any, Any]) -> int:
    if not _is_integer(pair[0]) or pair[0] < 0:
        raise BudgetError(f"age: {pair} must start with a number of images, 0 for the newest image.")
    return int(pair[0])


def _read_kept(pair: tuple[Any, Any]) -> float | int:
    kept: Any = pair[1]
    if _is_integer(kept) and kept >= 1:
        return int(kept)
    if isinstance(kept, numbers.Real) and not isinstance(kept, numbers.Integral) and 0 < float(kept) <= 1:
        return float(kept)
    raise BudgetError(f"age: {pair} must end with a share in (0, 1] of the image's budget, or a number of tokens.")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def compute_ages(images: int, step: int = 1) -> list[int]:
    """Return the age of each image of a prompt, in order.

    The age is the number of later images at the time when the number of images last was a multiple of `step`. Images
    added since then have age 0.
    """
    counted = step * (images // step)
    return [max(0, counted - 1 - index) for index in range(images)]


def find_bounds(tiers: Tiers, age: int) -> tuple[float | int, ...]:
    """Return the limits for an image of this age: the smallest share below 1, and the smallest number of tokens.

    Each is present only if a tier sets it.
    """
    kept = [kept for min_age, kept in tiers if min_age <= age]
    shares = [value for value in kept if isinstance(value, float) and value < 1]
    counts = [value for value in kept if isinstance(value, int)]
    return (*sorted(shares)[:1], *sorted(counts)[:1])


def count_kept(kept: int, bounds: Sequence[float | int]) -> int:
    """Return the number of tokens that an image keeps, at least 1.

    Args:
        kept: Number of tokens that the image keeps when it is the newest.
        bounds: Result of `find_bounds`.
    """
    return min([kept, *(bound if isinstance(bound, int) else max(1, round(kept * bound)) for bound in bounds)])


def apply_ages(kept: Sequence[int], tiers: Tiers, step: int) -> list[int]:
    """Return the number of tokens that each image of a prompt keeps at its age, at least 1.

    Args:
        kept: Number of tokens that each image keeps when it is the newest, in order.
        tiers: Pairs (age, kept). The last tier with at most the image's age applies.
        step: See `Ages`.
    """
    ages = compute_ages(len(kept), step)
    return [count_kept(count, find_bounds(tiers, age)) for count, age in zip(kept, ages, strict=True)]
