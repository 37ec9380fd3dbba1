# SPDX-License-Identifier: Apache-2.0
"""benchmarks/experiments/rank_agreement.py: our order of methods beside the published one."""

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
    found = script.published_scores(["divprune", "fastv", "uniform"], 64)
    assert found == {"divprune": pytest.approx((93.7 + 95.0) / 2), "fastv": pytest.approx((75.6 + 76.9) / 2)}


def answers(share: float, images: int = 50) -> np.ndarray:
    """Answers to 8 questions an image, of which `share` of the images are right."""
    return np.repeat(np.arange(images) < share * images, 8).astype(float)


@pytest.mark.parametrize(("ours", "tau"), [((0.9, 0.6, 0.2), 1.0), ((0.2, 0.6, 0.9), -1.0), ((0.9, 0.2, 0.6), 1 / 3)])
def test_tau_tells_how_many_pairs_are_in_the_same_order(script: Any, ours: tuple, tau: float) -> None:
    theirs = {"a": 97.0, "b": 90.0, "c": 70.0}
    scores = {name: answers(share) for name, share in zip("abc", ours, strict=True)}
    found = script.agreement(scores, theirs, [n // 8 for n in range(400)], 60)
    assert found["tau"] == pytest.approx(tau, abs=1e-3)
    assert found["low"] <= found["tau"] <= found["high"]


def test_the_interval_is_wide_where_images_decide_the_order(script: Any) -> None:
    generator = np.random.default_rng(0)
    close = {name: np.repeat(generator.permutation(20) < 10 + n, 8).astype(float) for n, name in enumerate("cba")}
    found = script.agreement(close, {"a": 97.0, "b": 90.0, "c": 70.0}, [n // 8 for n in range(160)], 60)
    assert found["low"] < 0 < found["high"]
