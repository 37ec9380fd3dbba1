# SPDX-License-Identifier: Apache-2.0
"""How far a benchmark puts methods into the order in which papers put them: Kendall's tau, with its interval.

The published order is that of LLaVA-1.5-7B at 192, 128 or 64 of 576 tokens: the mean of what the sources in
experiments/papers/llava15_7b.json print for a method. Ours is the share of right answers at one `keep`. The interval
comes from drawing the benchmark's images anew, with all their questions; the published numbers have none, so it says
nothing of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import calm_threads  # noqa: F401
import numpy as np
from papers.published import published
from scipy.stats import kendalltau

RESAMPLES = 500


def published_scores(methods: Sequence[str], budget: int) -> dict[str, float]:
    """Return the mean published percentage at 192, 128 or 64 tokens of each of `methods` that has one."""
    data = published()
    found = {name: [row.average for row in data.of(name, budget) if row.average is not None] for name in methods}
    return {name: fmean(values) for name, values in found.items() if values}


def answers(records: Sequence[Mapping[str, Any]], keep: float) -> dict[str, np.ndarray]:
    """Return for each method at `keep` how right each question is, averaged over its seeds: float `[questions]`."""
    rows = [one for one in records if one["record"] == "result" and one["keep"] == keep and one["site"] is not None]
    return {row["method"]: np.mean([[int(c) for c in seed] for seed in row["right"]], axis=0) for row in rows}


def images_of(header: Mapping[str, Any]) -> list[int]:
    """Return the number of each question's image. Older headers lack it: each image has one question of each kind."""
    if "image_of_question" in header:
        return header["image_of_question"]
    return [number // len(header["kinds"]) for number in range(len(header["kind_of_question"]))]


def agreement(
    scores: Mapping[str, np.ndarray], theirs: Mapping[str, float], images: Sequence[int], resamples: int = RESAMPLES
) -> dict[str, float]:
    """Return Kendall's tau-b between the order of our means and `theirs`, with its 95 % interval.

    scores: by method, of each question. images: the number of each question's image.
    """
    names = sorted(theirs)
    _, places, asked = np.unique(images, return_inverse=True, return_counts=True)
    ours = np.zeros((len(names), len(asked)))  # right answers of each image
    for row, name in zip(ours, names, strict=True):
        np.add.at(row, places, scores[name])
    ranks = [theirs[name] for name in names]
    generator = np.random.default_rng(0)
    draws = generator.integers(len(asked), size=(resamples, len(asked)))
    taus = [kendalltau(ours[:, draw].sum(1) / asked[draw].sum(), ranks).statistic for draw in draws]
    low, high = np.nanpercentile(taus, [2.5, 97.5])
    tau = kendalltau(ours.sum(1), ranks).statistic
    return {"tau": round(float(tau), 3), "low": round(float(low), 3), "high": round(float(high), 3)}
