# SPDX-License-Identifier: Apache-2.0
"""Test by betting whether a mean drop is below a limit. Valid for any number of questions, also if no answer changed.

A bootstrap or normal interval has zero width if the patched model answers every question as before, so it would
promise anything after ten questions. In this test a player starts with 1 and bets, question by question, that the drop
is below the limit. If the drop is not below the limit, the game is fair or worse, so 1 / (the player's highest wealth)
is a p-value.

Source:
    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (arXiv 2010.09686), section 4.
    The size of each bet follows Voracek and Orabona, "STaR-Bets" (arXiv 2505.22422): the bet that reaches 1 / level
    at the last question, given the variance so far.

Differences from the paper:
    - The variance starts from `PRIOR_COUNT` imagined answers of variance 1/4.
    - A bet risks at most `MAX_BET` of the wealth. The test stays valid: a bet may depend on all earlier questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PRIOR_COUNT, MAX_BET = 4, 0.9
LIKELY = 0.8  # chance to pass the test that `estimate_questions_needed` plans for
_GAMES = 500
_TARGET = 1 - 1e-9  # times 1 / level: tolerance for rounding errors


def compute_wealth(drops: np.ndarray, limits: Sequence[float] | np.ndarray, level: float) -> np.ndarray:
    """Return the player's highest wealth in each game, float64, shape (games,). A player stops at about 1 / level.

    Args:
        drops: Drops in [-1, 1], shape (questions,) or (questions, games). The order must not depend on their values.
        limits: One limit in (-1, 1) per game.
        level: Significance level of the test.
    """
    values = (1 - np.asarray(drops, float)) / 2  # gains in [0, 1]; their mean is at most `fair` under the hypothesis
    fair = (1 - np.asarray(limits, float)) / 2
    goal = math.log(1 / level)
    owned = np.zeros(np.broadcast_shapes(values.shape[1:], fair.shape))  # log wealth, as is `highest`
    highest = np.zeros_like(owned)
    total, squares, count = PRIOR_COUNT * 0.5, PRIOR_COUNT * 0.25, PRIOR_COUNT
    for left, value in zip(range(len(values), 0, -1), values, strict=True):
        variance = squares / count - (total / count - 0.5) ** 2
        bet = np.minimum(np.sqrt(2 * np.maximum(goal - owned, 0) / (variance * left)), MAX_BET / fair)
        bet[highest >= goal + math.log(_TARGET)] = 0
        owned += np.log1p(bet * (value - fair))
        highest = np.maximum(highest, owned)
        total, squares, count = total + value, squares + (value - 0.5) ** 2, count + 1
    return np.exp(highest)


def compute_p_value(drops: np.ndarray, limit: float, level: float) -> float:
    """Return a p-value of the hypothesis "the mean drop is at least `limit`". It does not fall below about `level`."""
    return float(1 / compute_wealth(drops, [limit], level)[0])


def is_below(drops: np.ndarray, limit: float, level: float) -> bool:
    """Return True if the test shows the mean drop to be below `limit`. The error probability is at most `level`.

    Examples:
        >>> is_below(np.zeros(300), limit=0.01, level=0.05), is_below(np.zeros(299), limit=0.02, level=0.05)
        (False, True)
    """
    return compute_p_value(drops, limit, level) * _TARGET <= level


def compute_upper_bound(drops: np.ndarray, level: float, step: float = 0.001) -> float:
    """Return an upper confidence bound of the mean drop, on a grid of `step`. 1 if no smaller limit passes the test."""
    limits = np.arange(math.ceil(float(np.mean(drops)) / step) * step, 1, step)
    open_ = np.flatnonzero(compute_wealth(drops, limits, level) * level < _TARGET)
    if not len(limits):
        return 1.0
    bound = np.append(limits, 1.0)[open_[-1] + 1] if len(open_) else limits[0]
    return round(float(bound), 9)  # 0.022, not 0.022000000000000013


def count_questions_needed(limit: float, level: float) -> int:
    """Return the minimum number of questions that can show a drop below `limit`, about ln(1 / level) / limit.

    This minimum assumes that no answer changes.
    """
    low, high = 0, 2
    while not is_below(np.zeros(high), limit, level):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_below(np.zeros(middle), limit, level) else (middle, high)
    return high


def estimate_questions_needed(
    drops: np.ndarray, limit: float, level: float, min_questions: int, max_questions: int
) -> int | None:
    """Estimate the number of questions that show a drop below `limit` with a chance of `LIKELY`.

    The estimate draws 500 games with a fixed seed from `drops`, so it is no better than these answers.

    Args:
        drops: Observed drops of one setting, shape (questions,).
        limit: Limit of the mean drop.
        level: Significance level of the test.
        min_questions: Number of questions known to be too few.
        max_questions: Largest number of questions to consider.

    Returns:
        The number of questions, or None if `max_questions` are not enough.
    """

    def likely(questions: int) -> bool:
        drawn = np.random.default_rng(0).choice(drops, size=(questions, _GAMES))
        return float(np.mean(1 / compute_wealth(drawn, [limit], level) * _TARGET <= level)) >= LIKELY

    if not len(drops) or float(np.mean(drops)) >= limit:
        return None
    low, high = min_questions, min_questions + max(16, min_questions // 4)
    while not likely(high):
        if high >= max_questions:
            return None
        low, high = high, min(max_questions, math.ceil(1.5 * high))
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
