# SPDX-License-Identifier: Apache-2.0
"""Panels of made-up answers, on which the search is played without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokenprune.errors import TokenPruneError
from tokenprune.settings import Setting


class Fake:
    """A panel without a model. losses: for each candidate the share of right answers that it loses, and its cost."""

    videos = False

    def __init__(self, questions: int, losses: dict[Setting, tuple[float, float]], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kinds, self.groups = [f"k{number % 2}" for number in range(questions)], list(range(questions))
        self.costs = {one: price for one, (_, price) in losses.items()}
        self.answers: dict[Setting | None, np.ndarray] = {None: np.ones(questions)}
        for one, (loss, _) in losses.items():
            self.answers[one] = 1.0 - (rng.permutation(questions) < round(loss * questions))
        self.asked: list[tuple[Setting | None, int]] = []
        self.broken: dict[Setting, TokenPruneError] = {}
        self.times: dict[Setting, float] = {}  # ratios of time; default: those of FLOPs
        self.timed: list[Setting] = []
        self.spread = 0.1
        self.predicted: dict[Setting, dict[str, float]] = {}

    def ask(
        self, candidate: Setting | None, chunk: Sequence[int], told: Callable[[int], None] = lambda size: None
    ) -> None:
        if candidate in self.broken:
            raise self.broken[candidate]
        self.asked += [(candidate, number) for number in chunk]
        told(len(chunk))

    def answered_questions(self, candidate: Setting | None) -> set[int]:
        return {number for one, number in self.asked if one == candidate}

    def scores(self, candidate: Setting | None, numbers: Sequence[int]) -> np.ndarray:
        assert set(numbers) <= self.answered_questions(candidate), "looks at answers that were not given"
        return self.answers[candidate][list(numbers)]

    def is_cached(self, candidate: Setting | None, chunk: Sequence[int]) -> bool:
        return {(candidate, number) for number in chunk} <= set(self.asked)

    def cost(self, candidate: Setting) -> dict[str, Any]:
        """FLOPs as they were given; tokens are their square, and the cache is larger where they are few."""
        ratio, asked = self.costs[candidate], sum(one == candidate for one, _ in self.asked)
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": 100 * ratio**2 * asked, "keep_ratio": ratio,
            "visual_tokens_in": 100 * asked, "kv_bytes": (1.05 - ratio) * 2048 * asked, "kv_bytes_full": 2048 * asked,
        }  # fmt: skip

    def predict(self, candidate: Setting) -> dict[str, float]:
        return self.predicted.get(candidate, {})

    def time(self, candidate: Setting, numbers: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        self.timed.append(candidate)
        ratio = self.times.get(candidate, self.costs[candidate])
        quantiles = {"p20": ratio * (1 - self.spread / 2), "p50": ratio, "p80": ratio * (1 + self.spread / 2)}
        told = {"ttft_ratio": quantiles, "ttft_ms": {"p50": 90 * ratio}, "ttft_ms_unpatched": {"p50": 100.0}}
        return told | ({"batch_ratio": {name: value**2 for name, value in quantiles.items()}} if batch else {})


def candidates(losses: dict[str, tuple[float, float]]) -> dict[Setting, tuple[float, float]]:
    """From "dart 0.5" to a candidate."""
    return {
        Setting.from_json({"method": one.split()[0], "keep": float(one.split()[1])}): two for one, two in losses.items()
    }
