# SPDX-License-Identifier: Apache-2.0
"""Naive loop of PriorTR (arXiv 2606.24156)."""

from __future__ import annotations

import math
from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def rank(posterior: list[float], prior: list[float]) -> list[float]:
    """Return P log(P / Q) of each token, with P and Q normalized over the image."""
    p = [value / (sum(posterior) + 1e-10) for value in posterior]
    q = [value / (sum(prior) + 1e-10) for value in prior]
    return [a * math.log((a + 1e-10) / (b + 1e-10)) for a, b in zip(p, q, strict=True)]


def naive(arrived: Arrived, decoder: Any, query: str = "last") -> list[int]:
    """Rank the attention of the query tokens (posterior) against that of the first text token (prior)."""
    queries = [arrived.last] if query == "last" else arrived.text
    attention = arrived.before.double().mean(0)
    posterior = [sum(float(attention[j, i]) for j in queries) for i in arrived.places]
    prior = [float(attention[min(arrived.text), i]) if arrived.text else 0.0 for i in arrived.places]
    score = rank(posterior, prior)
    return [arrived.places[i] for i in best(score, arrived.keep)]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    scores = []
    for row, count in enumerate(tokens.counts):
        posterior = tokens.last_row_attention[row, :, :count].mean(0).tolist()
        prior = tokens.first_row_attention[row, :, :count].mean(0).tolist()
        scores.append(rank(posterior, prior))
    return [best(score, keep) for score, keep in zip(scores, tokens.keep, strict=True)]


ROWS = {
    "priortr": Cuts(
        naive=naive,
        tried=({}, {"query": "question"}),
        refused=({"layer": 0}, {"query": "first"}),
        families=("llava", "qwen2_5_vl"),
        layers=(3,),
        ties=ties,
    )
}
