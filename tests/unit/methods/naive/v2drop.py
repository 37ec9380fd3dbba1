# SPDX-License-Identifier: Apache-2.0
"""v2drop: a loop written from its description."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived, best
from tokenprune import VisualTokens


def naive(seen: Arrived, decoder: Any) -> list[int]:
    """What changes most stays, also at neighbouring layers and at layer 1, which the embeddings enter."""
    change = {i: float((seen.hidden[i].double() - seen.previous[i].double()).square().sum()) for i in seen.places}
    return sorted(seen.places, key=lambda i: (-change[i], i))[: seen.keep]


def ties(tokens: VisualTokens, cut: int) -> list[list[int]]:
    change = (tokens.hidden.float() - tokens.previous_hidden.float()).norm(dim=-1).tolist()
    return [best(row[:n], k) for row, n, k in zip(change, tokens.counts, tokens.keep, strict=True)]


ROWS = {"v2drop": Cuts(naive=naive, families=("llava", "qwen2_5_vl"), layers=(1, 2, 3), ties=ties)}
