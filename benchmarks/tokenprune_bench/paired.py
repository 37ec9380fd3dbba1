# SPDX-License-Identifier: Apache-2.0
"""A method against another on the same questions: the difference with its interval, McNemar's test, hard questions."""

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
    """Answers to all questions. scores: `[seeds][questions]`. right: one "1" or "0" a question, a string a seed; None
    where the metric knows no right and wrong. graded: whether there are scores in between."""

    scores: Sequence[Sequence[float]]
    right: Sequence[str] | None
    graded: bool = False

    @property
    def means(self) -> np.ndarray:
        """The score of each question, averaged over the seeds."""
        return np.asarray(self.scores, float).mean(0)


@dataclass(frozen=True)
class PairedDifference:
    """difference: of the mean scores, ours minus theirs, with its 95 % interval. p: of McNemar's exact two-sided test,
    None where there is no right and wrong."""

    difference: float
    low: float
    high: float
    p: float | None


def bootstrap(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the percentile interval of a mean over questions, by resampling them (Efron and Tibshirani, 1993, ch. 13).

    Deterministic: the seed is fixed. Without a second value to vary, or where all are equal, it has no width.
    """
    mean = float(np.mean(values)) if len(values) else 0.0
    if len(values) < 2 or np.ptp(values) == 0:
        return mean, mean
    try:
        from scipy.stats import bootstrap as resample
    except ImportError as error:
        raise TokenPruneError("the benchmark needs scipy: pip install tokenprune-bench") from error
    interval = resample(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, 2**22 // len(values)),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    # Rounding may leave the mean outside.
    return min(mean, float(interval.low)), max(mean, float(interval.high))


def compare_paired(ours: Answers, theirs: Answers) -> PairedDifference:
    """Compare answers to the same questions, pair by pair: seeds are averaged first, then questions resampled."""
    gaps = ours.means - theirs.means
    p = None
    if ours.right is not None and theirs.right is not None:
        wins, losses = count_discordant(interleave_seeds(ours.right), interleave_seeds(theirs.right))
        p = float(import_binomtest()(wins, wins + losses, 0.5).pvalue) if wins + losses else 1.0
    return PairedDifference(float(gaps.mean()), *bootstrap(gaps), p)


def is_better_graded(ours: Answers, theirs: Answers) -> bool:
    """Return True if our graded scores are significantly better: the one-sided interval of the difference at `LEVEL`
    lies above zero."""
    return bootstrap(ours.means - theirs.means, 1 - 2 * LEVEL)[0] > 0
