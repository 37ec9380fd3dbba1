# SPDX-License-Identifier: Apache-2.0
"""Compare the order of methods in a benchmark with their order in papers: Kendall's tau, with its interval.

The published order is for LLaVA-1.5-7B at 192, 128 or 64 of 576 tokens: the mean of the numbers that the sources in
experiments/papers/llava15_7b.json print for a method. Our order is by the share of right answers at one `keep`. The
interval is a bootstrap over the benchmark's images with all their questions. It does not cover the uncertainty of the
published numbers.
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
    """Return the mean published percentage of each method with a number at 192, 128 or 64 tokens."""
    data = published()
    averages = {
        name: [row.average for row in data.get_rows(name, budget) if row.average is not None] for name in methods
    }
    return {name: fmean(values) for name, values in averages.items() if values}


def answers(records: Sequence[Mapping[str, Any]], keep: float) -> dict[str, np.ndarray]:
    """Return the score of each question for each method at `keep`, averaged over seeds: float, shape (questions,)."""
    rows = [
        record
        for record in records
        if record["record"] == "result" and record["keep"] == keep and record["site"] is not None
    ]
    return {row["method"]: np.mean([[int(c) for c in seed] for seed in row["right"]], axis=0) for row in rows}


def images_of(header: Mapping[str, Any]) -> list[int]:
    """Return the image index of each question. Older headers lack it: each image has one question of each kind."""
    if "image_of_question" in header:
        return header["image_of_question"]
    return [index // len(header["kinds"]) for index in range(len(header["kind_of_question"]))]


def agreement(
    scores: Mapping[str, np.ndarray],
    paper_scores: Mapping[str, float],
    images: Sequence[int],
    resamples: int = RESAMPLES,
) -> dict[str, float]:
    """Return Kendall's tau-b between the order of our mean scores and `theirs`, with its 95 % interval.

    Args:
        scores: Scores of the questions, by method.
        theirs: Published score of each method.
        images: Image index of each question.
        resamples: Number of bootstrap samples.
    """
    names = sorted(paper_scores)
    _, indices, num_questions = np.unique(images, return_inverse=True, return_counts=True)
    ours = np.zeros((len(names), len(num_questions)))  # right answers per image
    for row, name in zip(ours, names, strict=True):
        np.add.at(row, indices, scores[name])
    ranks = [paper_scores[name] for name in names]
    generator = np.random.default_rng(0)
    draws = generator.integers(len(num_questions), size=(resamples, len(num_questions)))
    taus = [kendalltau(ours[:, draw].sum(1) / num_questions[draw].sum(), ranks).statistic for draw in draws]
    low, high = np.nanpercentile(taus, [2.5, 97.5])
    tau = kendalltau(ours.sum(1), ranks).statistic
    return {"tau": round(float(tau), 3), "low": round(float(low), 3), "high": round(float(high), 3)}
