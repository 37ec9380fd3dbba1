# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FitPrune (arXiv 2409.10197)."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive(arrived: Arrived, decoder: Any) -> list[int]:
    """Score by self-attention times cross-attention, each the mean over query rows of the maximum over heads."""
    means = []
    for queries in (arrived.places, arrived.text):
        means.append(
            [
                sum(max(float(head[j, i]) for head in arrived.before) for j in queries) / len(queries)
                for i in arrived.places
            ]
        )
    return [arrived.places[i] for i in best([a * b for a, b in zip(*means, strict=True)], arrived.keep)]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    score = tokens.head_maxima.float().prod(1).tolist()
    return [best(row[:count], num_kept) for row, count, num_kept in zip(score, tokens.counts, tokens.keep, strict=True)]


ROWS = {"fitprune": Cuts(naive=naive, layers=(1, 2, 3), ties=ties, stages=1)}
