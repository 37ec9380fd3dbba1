# SPDX-License-Identifier: Apache-2.0
"""fitprune: a loop written from its description."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive(seen: Arrived, decoder: Any) -> list[int]:
    """By the product of what the image's own tokens and what the text pays: of each row the most of any head."""
    means = []
    for lines in (seen.places, seen.text):
        means.append(
            [sum(max(float(head[j, i]) for head in seen.before) for j in lines) / len(lines) for i in seen.places]
        )
    return [seen.places[i] for i in best([a * b for a, b in zip(*means, strict=True)], seen.keep)]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    score = tokens.head_maxima.float().prod(1).tolist()
    return [best(row[:n], k) for row, n, k in zip(score, tokens.counts, tokens.keep, strict=True)]


ROWS = {"fitprune": Cuts(naive=naive, layers=(1, 2, 3), ties=ties, stages=1)}
