# SPDX-License-Identifier: Apache-2.0
"""Intervals and paired tests on strings of right (1) and wrong (0) answers, one character a question."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from tokenprune.errors import TokenPruneError

T = TypeVar("T", bound=Hashable)

LEVEL = 0.05  # of the one-sided test


def import_binomtest() -> Any:
    """Return scipy's binomial test; raises TokenPruneError without scipy."""
    try:
        from scipy.stats import binomtest as made
    except ImportError as error:
        raise TokenPruneError("the benchmark needs scipy: pip install tokenprune-bench") from error
    return made


def wilson(right: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a share, both ends in [0, 1]."""
    if n == 0:
        return 0.0, 1.0
    interval = import_binomtest()(right, n).proportion_ci(confidence_level=level, method="wilson")
    # Rounding may leave 1 - 1e-16 at the ends.
    return max(0.0, float(interval.low)), min(1.0, float(interval.high))


def pooled_interval(answers: Sequence[str]) -> tuple[float, float, float]:
    """Return the share right over all seeds, and its interval.

    answers: one string a seed, all on the same questions. The interval counts each question once, however many seeds
    answered it: answers to one question are not independent.
    """
    n = len(answers[0])
    if n == 0:
        return 0.0, 0.0, 1.0
    share = sum(one.count("1") for one in answers) / (n * len(answers))
    return share, *wilson(round(share * n), n)


def interleave_seeds(answers: Sequence[str]) -> str:
    """Return one answer a question, question i from seed i mod S: a paired test sees each question once, all seeds."""
    return "".join(answers[index % len(answers)][index] for index in range(len(answers[0])))


def count_discordant(ours: str, theirs: str) -> tuple[int, int]:
    """Return how many questions only we and only they answered right."""
    pairs = list(zip(ours, theirs, strict=True))
    return pairs.count(("1", "0")), pairs.count(("0", "1"))


def better_p(ours: str, theirs: str) -> float:
    """Return the one-sided p-value of McNemar's exact test: how likely so many wins are if we are no better."""
    wins, losses = count_discordant(ours, theirs)
    if wins + losses == 0:
        return 1.0
    return float(import_binomtest()(wins, wins + losses, 0.5, alternative="greater").pvalue)


def holm(p: Mapping[T, float]) -> dict[T, float]:
    """Return p-values corrected for their number (Holm, 1979): each compares with one level for the whole family."""
    corrected, highest = {}, 0.0
    for place, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p) - place) * value))
        corrected[name] = highest
    return corrected


def is_better(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return True if our answers (one string a seed) are significantly better than theirs to the same questions."""
    return better_p(interleave_seeds(ours), interleave_seeds(theirs)) < LEVEL
