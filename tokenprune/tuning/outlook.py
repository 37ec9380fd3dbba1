# SPDX-License-Identifier: Apache-2.0
"""What the search may expect of a candidate, and which candidates are worth more questions, or a test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenprune.tuning.promise import Promise

CHANCE = 0.05  # to pass: with less, a candidate is not tested
_IMAGINED = 2  # answers: one that is lost and one that is won


@dataclass(frozen=True)
class Outlook:
    """saving: of cost, as a share. chance: to pass the test on the held-out questions, as the search tells it."""

    saving: float
    chance: float

    @classmethod
    def of(cls, drops: np.ndarray, saving: float, promise: Promise, held_out: int) -> Outlook:
        """Normal approximation; as many imagined answers that are lost and won keep few real ones from certainty."""
        mean, count = float(drops.mean()), len(drops)
        spread = math.sqrt((float(((drops - mean) ** 2).sum()) + _IMAGINED) / (count + _IMAGINED))
        normal = NormalDist()
        margin = normal.inv_cdf(promise.confidence) * spread / math.sqrt(held_out)
        error = spread * math.sqrt(1 / count + 1 / held_out)
        return cls(saving, normal.cdf((promise.max_drop - mean - margin) / error))

    @property
    def worth(self) -> float:
        return self.saving * self.chance


def halve(outlooks: Sequence[Outlook], places: int) -> list[int]:
    """Return the indices of the best, by turns the one with the largest expected saving and the safest (among equals:
    the most expensive)."""
    indices = range(len(outlooks))
    good = sorted(indices, key=lambda index: -outlooks[index].worth)
    safe = sorted(indices, key=lambda index: (-outlooks[index].chance, outlooks[index].saving))
    both = [index for pair in zip(good, safe, strict=True) for index in pair]
    return list(dict.fromkeys(both))[:places]


def sequence(outlooks: Sequence[Outlook]) -> list[int]:
    """Return the indices to be tested, in the given order, such that the expected saving of the last one that passes is
    the largest, if they passed independently. Each further test may be the one that fails."""

    def expected(indices: Sequence[int]) -> float:
        value, through = 0.0, 1.0
        for place, index in enumerate(indices):
            through *= outlooks[index].chance
            after = outlooks[indices[place + 1]].chance if place + 1 < len(indices) else 0.0
            value += through * (1 - after) * outlooks[index].saving
        return value

    fit = [index for index, one in enumerate(outlooks) if one.chance >= CHANCE]
    subsets = itertools.chain.from_iterable(itertools.combinations(fit, size) for size in range(len(fit) + 1))
    return list(max(subsets, key=expected))


__all__ = ["CHANCE", "Outlook", "halve", "sequence"]
