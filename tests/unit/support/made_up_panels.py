# SPDX-License-Identifier: Apache-2.0
"""Panels of made-up answers, to run the search without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokenprune.errors import TokenPruneError
from tokenprune.settings import Setting


class Fake:
    """A panel without a model. losses: the share of right answers that each candidate loses, and its cost."""

    videos = False

    def __init__(self, questions: int, losses: dict[Setting, tuple[float, float]], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kinds, self.groups = [f"k{index % 2}" for index in range(questions)], list(range(questions))
        self.costs = {candidate: price for candidate, (_, price) in losses.items()}
        self.answers: dict[Setting | None, np.ndarray] = {None: np.ones(questions)}
        for candidate, (loss, _) in losses.items():
            self.answers[candidate] = 1.0 - (rng.permutation(questions) < round(loss * questions))
        self.asked: list[tuple[Setting | None, int]] = []
        self.broken: dict[Setting, TokenPruneError] = {}
        self.times: dict[Setting, float] = {}  # time ratios, by default the FLOPs ratios
        self.timed: list[Setting] = []
        self.spread = 0.1
        self.predicted: dict[Setting, dict[str, float]] = {}

    def ask(
        self, candidate: Setting | None, chunk: Sequence[int], progress: Callable[[int], None] = lambda size: None
    ) -> None:
        if candidate in self.broken:
            raise self.broken[candidate]
        self.asked += [(candidate, index) for index in chunk]
        progress(len(chunk))

    def answered_questions(self, candidate: Setting | None) -> set[int]:
        return {index for asked, index in self.asked if asked == candidate}

    def scores(self, candidate: Setting | None, indices: Sequence[int]) -> np.ndarray:
        assert set(indices) <= self.answered_questions(candidate), "looks at answers that were not given"
        return self.answers[candidate][list(indices)]

    def is_cached(self, candidate: Setting | None, chunk: Sequence[int]) -> bool:
        return {(candidate, index) for index in chunk} <= set(self.asked)

    def cost(self, candidate: Setting) -> dict[str, Any]:
        """Return the given FLOPs ratio. Token counts are its square, and the cache is larger where tokens are few."""
        ratio, calls = self.costs[candidate], sum(asked_candidate == candidate for asked_candidate, _ in self.asked)
        return {
            "prefill_flops_ratio": ratio, "visual_tokens_average": 100 * ratio**2 * calls, "keep_ratio": ratio,
            "visual_tokens_in": 100 * calls, "kv_bytes": (1.05 - ratio) * 2048 * calls, "kv_bytes_full": 2048 * calls,
        }  # fmt: skip

    def predict(self, candidate: Setting) -> dict[str, float]:
        return self.predicted.get(candidate, {})

    def time(self, candidate: Setting, indices: Sequence[int], repeats: int, batch: bool = False) -> dict[str, Any]:
        self.timed.append(candidate)
        ratio = self.times.get(candidate, self.costs[candidate])
        quantiles = {"p20": ratio * (1 - self.spread / 2), "p50": ratio, "p80": ratio * (1 + self.spread / 2)}
        times = {"ttft_ratio": quantiles, "ttft_ms": {"p50": 90 * ratio}, "ttft_ms_unpatched": {"p50": 100.0}}
        return times | ({"batch_ratio": {name: value**2 for name, value in quantiles.items()}} if batch else {})


def candidates(losses: dict[str, tuple[float, float]]) -> dict[Setting, tuple[float, float]]:
    """Parse keys such as "dart 0.5" into candidates."""
    return {
        Setting.from_json({"method": name.split()[0], "keep": float(name.split()[1])}): loss_and_cost
        for name, loss_and_cost in losses.items()
    }
