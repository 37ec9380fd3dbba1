# SPDX-License-Identifier: Apache-2.0
"""Paired comparison of two methods on the same questions: difference with interval, McNemar's test, bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenprune.errors import TokenPruneError
from tokenprune_bench.significance import LEVEL, count_discordant, import_binomtest, interleave_seeds

RESAMPLES = 2000
_SEED = 0


@dataclass(frozen=True)
class Answers:
    """Scores of all questions.

    Attributes:
        scores: Scores, shape (seeds, questions).
        right: One string per seed with "1" or "0" per question. None if the metric has no right and wrong.
        graded: Whether there are scores between right and wrong.
    """

    scores: Sequence[Sequence[float]]
    right: Sequence[str] | None
    graded: bool = False

    @property
    def means(self) -> np.ndarray:
        """Score of each question, averaged over the seeds."""
        return np.asarray(self.scores, float).mean(0)


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two mean scores.

    Attributes:
        difference: Our mean score minus their mean score.
        low: Lower end of the 95 % interval.
        high: Upper end of the 95 % interval.
        p: p-value of McNemar's exact two-sided test. None if the metric has no right and wrong.
    """

    difference: float
    low: float
    high: float
    p: float | None


def bootstrap(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of a mean over questions (Efron and Tibshirani, 1993, chapter 13).

    The seed is fixed. The interval has zero width for fewer than two values, or if all values are equal.
    """
    mean = float(np.mean(values)) if len(values) else 0.0
    if len(values) < 2 or np.ptp(values) == 0:
        return mean, mean
    try:
        from scipy.stats import bootstrap as resample
    except ImportError as error:
        raise TokenPruneError("The benchmark needs scipy: pip install tokenprune-bench.") from error
    interval = resample(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, 2**22 // len(values)),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    # Rounding may put the mean outside of the interval.
    return min(mean, float(interval.low)), max(mean, float(interval.high))


def compare_paired(ours: Answers, theirs: Answers) -> PairedDifference:
    """Compare answers to the same questions pair by pair. Seeds are averaged first, then questions are resampled."""
    gaps = ours.means - theirs.means
    p = None
    if ours.right is not None and theirs.right is not None:
        wins, losses = count_discordant(interleave_seeds(ours.right), interleave_seeds(theirs.right))
        p = float(import_binomtest()(wins, wins + losses, 0.5).pvalue) if wins + losses else 1.0
    return PairedDifference(float(gaps.mean()), *bootstrap(gaps), p)


def is_better_graded(ours: Answers, theirs: Answers) -> bool:
    """Return True if our graded scores are significantly better, by a one-sided interval at `LEVEL`."""
    return bootstrap(ours.means - theirs.means, 1 - 2 * LEVEL)[0] > 0
