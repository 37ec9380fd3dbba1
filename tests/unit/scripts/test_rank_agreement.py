# SPDX-License-Identifier: Apache-2.0
"""Test benchmarks/experiments/rank_agreement.py: the measured order of methods beside the published order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script(script: Any) -> Any:
    return script("rank_agreement")


def test_the_published_order_is_the_mean_of_all_sources(script: Any) -> None:
    scores = script.published_scores(["divprune", "fastv", "uniform"], 64)
    assert scores == {"divprune": pytest.approx((93.7 + 95.0) / 2), "fastv": pytest.approx((75.6 + 76.9) / 2)}


def build_answers(share: float, images: int = 50) -> np.ndarray:
    """Return answers to 8 questions per image, where `share` of the images have right answers."""
    return np.repeat(np.arange(images) < share * images, 8).astype(float)


@pytest.mark.parametrize(("shares", "tau"), [((0.9, 0.6, 0.2), 1.0), ((0.2, 0.6, 0.9), -1.0), ((0.9, 0.2, 0.6), 1 / 3)])
def test_tau_counts_pairs_in_the_same_order(script: Any, shares: tuple, tau: float) -> None:
    published = {"a": 97.0, "b": 90.0, "c": 70.0}
    scores = {name: build_answers(share) for name, share in zip("abc", shares, strict=True)}
    agreement = script.agreement(scores, published, [n // 8 for n in range(400)], 60)
    assert agreement["tau"] == pytest.approx(tau, abs=1e-3)
    assert agreement["low"] <= agreement["tau"] <= agreement["high"]


def test_the_interval_is_wide_where_images_decide_the_order(script: Any) -> None:
    generator = np.random.default_rng(0)
    close = {name: np.repeat(generator.permutation(20) < 10 + n, 8).astype(float) for n, name in enumerate("cba")}
    agreement = script.agreement(close, {"a": 97.0, "b": 90.0, "c": 70.0}, [n // 8 for n in range(160)], 60)
    assert agreement["low"] < 0 < agreement["high"]
