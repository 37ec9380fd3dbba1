# SPDX-License-Identifier: Apache-2.0
"""Budgets by age: older images of a prompt keep fewer tokens, in steps, so that a prefix cache holds between them."""

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
    """Tiers (age, kept) for the images of a prompt, and the number of images after which ages are recounted.

    Raises:
        BudgetError: If a tier is invalid; the message names it.
    """

    tiers: Tiers
    step: int = 1

    def __post_init__(self) -> None:
        if not _is_whole(self.step) or self.step < 1:
            raise BudgetError(f"step={self.step!r} must be a whole number of images, at least 1")
        if self.tiers is None:
            raise BudgetError(f"step={self.step} is about ages, and no age= is given: add one, or leave step out")
        vars(self).update(tiers=_read_tiers(self.tiers))

    @property
    def keeps_all(self) -> bool:
        """True if the tiers keep every image at every age as it is when new."""
        return all(kept == 1.0 and isinstance(kept, float) for _, kept in self.tiers)


def _read_tiers(age: Any) -> Tiers:
    try:
        pairs = [tuple(pair) for pair in age]
    except TypeError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise BudgetError(f"age={age!r} must be pairs of an age and what is kept, such as ((0, 1.0), (2, 0.5))")
    tiers: Tiers = tuple((_age(pair), _kept(pair)) for pair in pairs)
    if tiers[0] != (0, 1.0):
        raise BudgetError(f"age={age!r} begins with {pairs[0]}: the newest image keeps all of its budget, (0, 1.0)")
    for (earlier, more), (later, less) in pairwise(tiers):
        if later <= earlier:
            raise BudgetError(f"age: ages must rise, and {(later, less)} follows {(earlier, more)}")
        if type(less) is type(more) and less > more:
            raise BudgetError(f"age: {(later, less)} keeps more than {(earlier, more)}, and older images may not")
    return tiers


def _age(pair: tuple[Any, Any]) -> int:
    if not _is_whole(pair[0]) or pair[0] < 0:
        raise BudgetError(f"age: {pair} must begin with a number of images, 0 for the newest")
    return int(pair[0])


def _kept(pair: tuple[Any, Any]) -> float | int:
    kept: Any = pair[1]
    if _is_whole(kept) and kept >= 1:
        return int(kept)
    if isinstance(kept, numbers.Real) and not isinstance(kept, numbers.Integral) and 0 < float(kept) <= 1:
        return float(kept)
    raise BudgetError(f"age: {pair} must end with a share in (0, 1] of the image's budget, or a number of tokens")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def compute_ages(images: int, step: int = 1) -> list[int]:
    """Return the age of each of a prompt's images, in order: the number of images after it, as it was when the number
    of images last was a multiple of `step`. Images that came since are of age 0."""
    counted = step * (images // step)
    return [max(0, counted - 1 - number) for number in range(images)]


def find_bounds(tiers: Tiers, age: int) -> tuple[float | int, ...]:
    """Return the bounds of what an image of this age keeps: a share below 1 of what it keeps when new, a number of
    tokens, one of each, or neither."""
    there = [kept for since, kept in tiers if since <= age]
    shares = [kept for kept in there if isinstance(kept, float) and kept < 1]
    numbers = [kept for kept in there if isinstance(kept, int)]
    return (*sorted(shares)[:1], *sorted(numbers)[:1])


def count_kept(kept: int, bounds: Sequence[float | int]) -> int:
    """Return how many tokens an image keeps within its `bounds` (see `reached`), at least 1; kept: when it is new."""
    return min([kept, *(one if isinstance(one, int) else max(1, round(kept * one)) for one in bounds)])


def apply_ages(kept: Sequence[int], tiers: Tiers, step: int) -> list[int]:
    """Return what each of a prompt's images, in order, keeps at its age; kept: what it keeps when it is new.

    An image takes the last tier that is not above its age: a share of what it keeps when new, or a number of tokens.
    Counts do not rise with age, and are at least 1.
    """
    return [
        count_kept(count, find_bounds(tiers, age))
        for count, age in zip(kept, compute_ages(len(kept), step), strict=True)
    ]
