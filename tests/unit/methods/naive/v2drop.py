# SPDX-License-Identifier: Apache-2.0
"""Naive loop of V2Drop (arXiv 2509.01552)."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive(arrived: Arrived, decoder: Any) -> list[int]:
    """Keep the tokens with the greatest change ||h_l - h_(l-1)||."""
    change = {
        i: float((arrived.hidden[i].double() - arrived.previous[i].double()).square().sum()) for i in arrived.places
    }
    return sorted(arrived.places, key=lambda i: (-change[i], i))[: arrived.keep]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    change = (tokens.hidden.float() - tokens.previous_hidden.float()).norm(dim=-1).tolist()
    return [
        best(row[:count], num_kept) for row, count, num_kept in zip(change, tokens.counts, tokens.keep, strict=True)
    ]


ROWS = {"v2drop": Cuts(naive=naive, families=("llava", "qwen2_5_vl"), layers=(1, 2, 3), ties=ties)}
