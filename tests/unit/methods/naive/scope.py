# SPDX-License-Identifier: Apache-2.0
"""Naive loop of SCOPE (arXiv 2510.24214)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table, next_pick
from method_rows import Picks


def naive(x: Tensor, z: Tensor, a: Tensor, keep: int, kept: Any = (), slack: float = 0.0, alpha: float = 1.0,
          features: str = "projected", t: Any = None) -> list[int]:  # fmt: skip
    """Greedy coverage: gain_i = a_i^alpha times the sum over j of max(0, S_ij - cover_j)."""
    similarity, picks = cosine_table(z if features == "tower" else x), []
    cover = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(keep):
        gain = (similarity - cover).clamp(min=0).sum(1) * a**alpha
        picks.append(next_pick(gain, picks, kept, slack))
        cover = torch.maximum(cover, similarity[picks[-1]])
    return picks


ROWS = {
    "scope": Picks(
        naive=naive,
        tried=({}, {"alpha": 0.5, "features": "tower"}, {"alpha": 0}),
        refused=({"alpha": -1}, {"alpha": "1"}, {"features": "encoder"}),
        unchanged=("length of tokens", "turn of tokens", "unit of attention", "text"),
    )
}
