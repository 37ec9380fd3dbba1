# SPDX-License-Identifier: Apache-2.0
"""Estimates of candidates: the savings the search may expect, and the candidates worth more questions or a test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenprune_bench.tuning.promise import Promise

CHANCE = 0.05  # to pass: with less, a candidate is not tested, unless there is none that is safer
WEIGHT = 32  # answers that what is expected before any answer counts for
_IMAGINED = 2  # answers: one that is lost and one that is won


@dataclass(frozen=True)
class Estimate:
    """The saving of cost, as a share, and the chance to pass the test on the held-out questions."""

    saving: float
    chance: float

    @classmethod
    def of(cls, drops: np.ndarray, saving: float, promise: Promise, held_out: int, prior: float = 0.0) -> Estimate:
        """Return the estimate of a candidate by normal approximation. prior: the mean drop expected before any answer.

        The prior weighs as much as `WEIGHT` answers, so that of two candidates that lost nothing on few questions the
        milder one is the safer. A lost and a won answer are imagined, so that few real ones give no certainty. More
        answers won than lost count as luck, not as a reserve: else a setting that changes many answers would seem
        safer than one that changes none.
        """
        mean, count = float(drops.mean()), len(drops)
        spread = math.sqrt((float(((drops - mean) ** 2).sum()) + _IMAGINED) / (count + _IMAGINED))
        mean = max((mean * count + prior * WEIGHT) / (count + WEIGHT), 0.0)
        normal = NormalDist()
        margin = normal.inv_cdf(promise.confidence) * spread / math.sqrt(held_out)
        error = spread * math.sqrt(1 / (count + WEIGHT) + 1 / held_out)
        return cls(saving, normal.cdf((promise.max_drop - mean - margin) / error))

    @property
    def worth(self) -> float:
        return self.saving * self.chance


def select_promoted(estimates: Sequence[Estimate], places: int) -> list[int]:
    """Return the indices of the best, by turns the one with the largest expected saving and the safest."""
    good = sorted(range(len(estimates)), key=lambda index: -estimates[index].worth)
    both = [index for pair in zip(good, rank_by_safety(estimates), strict=True) for index in pair]
    return list(dict.fromkeys(both))[:places]


def rank_by_safety(estimates: Sequence[Estimate]) -> list[int]:
    """Return all indices, those with the largest chance to pass first, of equals those that save less; last those that
    save nothing."""

    def order(index: int) -> tuple[bool, float, float]:
        one = estimates[index]
        return one.saving <= 0, -round(one.chance, 9), one.saving

    return sorted(range(len(estimates)), key=order)


def select_tests(estimates: Sequence[Estimate], most: int) -> list[int]:
    """Return the indices to be tested, at most `most`, in order: first the safest that saves anything, whatever its
    chance; then those that save more than all before them, each less safe than the one before.

    A further one that passes is worth what it saves beyond the last; one that fails keeps those after it from being
    tested. Those are left out with which the expected saving of the last one that passes is smaller. For it the chance
    to get through several tests lies halfway between that of tests that know nothing of each other and that of tests
    which only differ in strictness: all are made with the same questions, and hard ones are hard for all.
    """

    def expected(chosen: Sequence[int]) -> float:
        value, saved, product, least = 0.0, 0.0, 1.0, 1.0
        for index in chosen:
            product, least = product * estimates[index].chance, min(least, estimates[index].chance)
            value += (product + least) / 2 * (estimates[index].saving - saved)
            saved = estimates[index].saving
        return value

    chain: list[int] = []
    for index in rank_by_safety(estimates):
        saving, chance = estimates[index].saving, estimates[index].chance
        if saving > (estimates[chain[-1]].saving if chain else 0) and (chance >= CHANCE or not chain):
            chain.append(index)
    first, rest = chain[:1], chain[1:]
    subsets = (first + list(one) for size in range(min(most, len(chain))) for one in itertools.combinations(rest, size))
    return max(subsets, key=expected, default=[])


def compute_prior(saving: float, limit: float, lost: float = 0.0, saved: float = 0.0) -> float:
    """Return the mean drop to expect of a setting that saves so much, before any answer: in proportion to its saving,
    the limit for all cost, or more where its method loses more at the keeps that have answered.

    lost, saved: sums over all answers of the method, of the drop and of the saving.
    """
    return max(saving, 0.0) * max(limit, (WEIGHT * limit + lost) / (WEIGHT + saved))


__all__ = ["CHANCE", "Estimate", "compute_prior", "rank_by_safety", "select_promoted", "select_tests"]
