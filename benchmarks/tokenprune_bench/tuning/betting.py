# SPDX-License-Identifier: Apache-2.0
"""Is a mean drop below a limit? A test by betting: valid for any number of questions, and where no answer changed.

A bootstrap or normal interval has no width when the patched model answers every question as before, and would promise
anything after ten questions. Here a player who starts with 1 bets, question by question, that the drop is below the
limit; under the hypothesis that it is not, the game is fair or worse, so 1 / (the most he ever owned) is a p-value.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (arXiv:2010.09686),
section 4; the size of each bet is that of Voracek and Orabona, "STaR-Bets" (arXiv:2505.22422): what it takes, by the
variance seen so far, to own 1 / level when the questions are over.
Differs from the papers: the variance starts from `PRIOR` imagined answers of variance 1/4, and a bet risks at most
`MOST` of what the player owns. Validity needs neither: a bet may depend on anything that came before its question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PRIOR_COUNT, MAX_BET = 4, 0.9
LIKELY = 0.8  # the chance to pass that an estimate of the questions needed is made for
_GAMES = 500
_TARGET = 1 - 1e-9  # of 1 / level: rounding must not cost a bet that was won


def compute_wealth(drops: np.ndarray, limits: Sequence[float] | np.ndarray, level: float) -> np.ndarray:
    """Return the most that the player owned, float64 `[games]`, at most about 1 / level: then he stops.

    drops: float `[questions]`, or `[questions, games]` for games of their own, each in [-1, 1], in an order that does
    not depend on them. limits: in (-1, 1), one for each game.
    """
    values = (1 - np.asarray(drops, float)) / 2  # a gain in [0, 1], of mean at most `fair` under the hypothesis
    fair = (1 - np.asarray(limits, float)) / 2
    goal = math.log(1 / level)
    owned = np.zeros(np.broadcast_shapes(values.shape[1:], fair.shape))  # a logarithm, as is the next
    most = np.zeros_like(owned)
    total, squares, count = PRIOR_COUNT * 0.5, PRIOR_COUNT * 0.25, PRIOR_COUNT
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        variance = squares / count - (total / count - 0.5) ** 2
        bet = np.minimum(np.sqrt(2 * np.maximum(goal - owned, 0) / (variance * left)), MAX_BET / fair)
        bet[most >= goal + math.log(_TARGET)] = 0
        owned += np.log1p(bet * (value - fair))
        most = np.maximum(most, owned)
        total, squares, count = total + value, squares + (value - 0.5) ** 2, count + 1
    return np.exp(most)


def compute_p_value(drops: np.ndarray, limit: float, level: float) -> float:
    """Return a p-value of "the mean drop is at least `limit`", for a test at `level`; it is not below about `level`."""
    return float(1 / compute_wealth(drops, [limit], level)[0])


def is_below(drops: np.ndarray, limit: float, level: float) -> bool:
    """Return True if the mean drop is shown to be below `limit`; wrong with a probability of at most `level`."""
    return compute_p_value(drops, limit, level) * _TARGET <= level


def compute_upper_bound(drops: np.ndarray, level: float, step: float = 0.001) -> float:
    """Return a limit that the mean drop is below, but for a probability of `level`, on a grid of `step`; 1 if none."""
    limits = np.arange(math.ceil(float(np.mean(drops)) / step) * step, 1, step)
    open_ = np.flatnonzero(compute_wealth(drops, limits, level) * level < _TARGET)
    if not len(limits):
        return 1.0
    found = np.append(limits, 1.0)[open_[-1] + 1] if len(open_) else limits[0]
    return round(float(found), 9)  # 0.022, not 0.022000000000000013


def count_questions_needed(limit: float, level: float) -> int:
    """Return how many questions it takes at least to show that the drop is below `limit`: if no answer changes at all.

    About ln(1 / level) / limit.
    """
    low, high = 0, 2
    while not is_below(np.zeros(high), limit, level):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_below(np.zeros(middle), limit, level) else (middle, high)
    return high


def estimate_questions_needed(seen: np.ndarray, limit: float, level: float, more_than: int, most: int) -> int | None:
    """Return how many questions it takes to show with a chance of about `LIKELY` that the drop is below `limit`, if
    answers go on to change as in `seen`, drops of one setting, `[questions]`; None if `most` are not enough.

    By drawing from `seen` (500 games with a fixed seed): an estimate, which knows no more than those answers.
    """

    def likely(questions: int) -> bool:
        drawn = np.random.default_rng(0).choice(seen, size=(questions, _GAMES))
        return float(np.mean(1 / compute_wealth(drawn, [limit], level) * _TARGET <= level)) >= LIKELY

    if not len(seen) or float(np.mean(seen)) >= limit:
        return None
    low, high = more_than, more_than + max(16, more_than // 4)
    while not likely(high):
        if high >= most:
            return None
        low, high = high, min(most, math.ceil(1.5 * high))
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        low, high = (low, middle) if likely(middle) else (middle, high)
    return high


__all__ = [
    "LIKELY",
    "compute_p_value",
    "compute_upper_bound",
    "compute_wealth",
    "count_questions_needed",
    "estimate_questions_needed",
    "is_below",
]
