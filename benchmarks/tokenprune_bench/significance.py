# SPDX-License-Identifier: Apache-2.0
"""Intervals and paired tests on strings of right (1) and wrong (0) answers, one character per question."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from tokenprune.errors import TokenPruneError

T = TypeVar("T", bound=Hashable)

LEVEL = 0.05  # significance level of the one-sided tests


def import_binomtest() -> Any:
    """Return scipy's binomial test.

    Raises:
        TokenPruneError: If scipy is not installed.
    """
    try:
        from scipy.stats import binomtest
    except ImportError as error:
        raise TokenPruneError("The benchmark needs scipy: pip install tokenprune-bench.") from error
    return binomtest


def wilson(right: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Return Wilson's interval of a share, within [0, 1]."""
    if n == 0:
        return 0.0, 1.0
    interval = import_binomtest()(right, n).proportion_ci(confidence_level=level, method="wilson")
    # Rounding may give 1 - 1e-16 at the ends.
    return max(0.0, float(interval.low)), min(1.0, float(interval.high))


def pooled_interval(answers: Sequence[str]) -> tuple[float, float, float]:
    """Return the share of right answers over all seeds, and its interval.

    The interval counts each question once, because answers of several seeds to one question are not independent.

    Args:
        answers: One string per seed, all on the same questions.
    """
    n = len(answers[0])
    if n == 0:
        return 0.0, 0.0, 1.0
    share = sum(answers_of_seed.count("1") for answers_of_seed in answers) / (n * len(answers))
    return share, *wilson(round(share * n), n)


def interleave_seeds(answers: Sequence[str]) -> str:
    """Return one answer per question, question i from seed i mod S, for paired tests over all seeds."""
    return "".join(answers[index % len(answers)][index] for index in range(len(answers[0])))


def count_discordant(ours: str, theirs: str) -> tuple[int, int]:
    """Return the number of questions that only we, and that only they, answered right."""
    pairs = list(zip(ours, theirs, strict=True))
    return pairs.count(("1", "0")), pairs.count(("0", "1"))


def better_p(ours: str, theirs: str) -> float:
    """Return the one-sided p-value of McNemar's exact test that we are better."""
    wins, losses = count_discordant(ours, theirs)
    if wins + losses == 0:
        return 1.0
    return float(import_binomtest()(wins, wins + losses, 0.5, alternative="greater").pvalue)


def holm(p: Mapping[T, float]) -> dict[T, float]:
    """Return p-values corrected for multiple tests (Holm, 1979). Compare each with the level of the whole family."""
    corrected, highest = {}, 0.0
    for rank, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (len(p) - rank) * value))
        corrected[name] = highest
    return corrected


def is_better(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Return True if our answers (one string per seed) are significantly better on the same questions."""
    return better_p(interleave_seeds(ours), interleave_seeds(theirs)) < LEVEL
