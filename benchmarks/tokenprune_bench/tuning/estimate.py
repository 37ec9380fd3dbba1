# SPDX-License-Identifier: Apache-2.0
"""Estimates of saving and chance per candidate, and the selection of candidates for more questions or a test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenprune_bench.tuning.promise import Promise

CHANCE = 0.05  # minimum chance to be tested; the safest candidate is tested in any case
WEIGHT = 32  # weight of the prior, in answers
_IMAGINED = 2  # imagined answers: one lost, one won


@dataclass(frozen=True)
class Estimate:
    """Expected saving of a candidate, and its chance to pass the test.

    Attributes:
        saving: Saved share of the unpatched cost.
        chance: Probability of passing the test on the held-out questions.
    """

    saving: float
    chance: float

    @classmethod
    def from_drops(
        cls, drops: np.ndarray, saving: float, promise: Promise, held_out: int, prior: float = 0.0
    ) -> Estimate:
        """Estimate the chance of a candidate by a normal approximation.

        The prior has the weight of `WEIGHT` answers, so that of two candidates without losses on few questions, the
        candidate with the smaller prior is safer. The variance includes one imagined lost and one imagined won answer,
        so a few answers never give certainty. A negative mean drop is treated as zero. Otherwise a setting that changes
        many answers would look safer than a setting that changes none.

        Args:
            drops: Score lost per question, float, shape (questions,).
            saving: Saved share of the unpatched cost.
            promise: The promise to test.
            held_out: Number of held-out questions.
            prior: Mean drop expected before any answer.
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
        """Expected saving: the saving times the chance."""
        return self.saving * self.chance


def select_promoted(estimates: Sequence[Estimate], count: int) -> list[int]:
    """Return the indices of the best candidates, alternating between the largest expected saving and the safest."""
    good = sorted(range(len(estimates)), key=lambda index: -estimates[index].worth)
    both = [index for pair in zip(good, rank_by_safety(estimates), strict=True) for index in pair]
    return list(dict.fromkeys(both))[:count]


def rank_by_safety(estimates: Sequence[Estimate]) -> list[int]:
    """Return all indices, the safest candidate first.

    Ties go to the smaller saving. Candidates without a saving are last.
    """

    def order(index: int) -> tuple[bool, float, float]:
        estimate = estimates[index]
        return estimate.saving <= 0, -round(estimate.chance, 9), estimate.saving

    return sorted(range(len(estimates)), key=order)


def select_tests(estimates: Sequence[Estimate], max_tests: int) -> list[int]:
    """Return the indices of the candidates to test, in order, at most `max_tests`.

    The first candidate is the safest that saves anything. Each later candidate saves more and is less safe than the
    previous candidate. If a test fails, the later candidates are not tested, so the function returns the subset with
    the largest expected saving. The chance to pass several tests is the mean of two bounds: independent tests (product)
    and fully dependent tests (minimum). The tests share their questions, so neither bound is exact.
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
    combinations = (itertools.combinations(rest, size) for size in range(min(max_tests, len(chain))))
    subsets = (first + list(combination) for combination in itertools.chain.from_iterable(combinations))
    return max(subsets, key=expected, default=[])


def compute_prior(saving: float, limit: float, lost: float = 0.0, saved: float = 0.0) -> float:
    """Return the mean drop to expect of a setting before any answer.

    The prior is proportional to the saving. It reaches `limit` for a saving of 1, or more if the method lost more at
    other keeps.

    Args:
        saving: Saved share of the unpatched cost.
        limit: Allowed mean drop.
        lost: Sum of the drops over all answers of the method.
        saved: Sum of the savings over all answers of the method.
    """
    return max(saving, 0.0) * max(limit, (WEIGHT * limit + lost) / (WEIGHT + saved))


__all__ = ["CHANCE", "Estimate", "compute_prior", "rank_by_safety", "select_promoted", "select_tests"]
