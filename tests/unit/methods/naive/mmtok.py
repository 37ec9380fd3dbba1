# SPDX-License-Identifier: Apache-2.0
"""Naive loop of MMTok (arXiv 2508.18264)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greedy import next_pick, unit
from method_rows import Picks


def table(
    x: Tensor, z: Tensor, t: Tensor, alpha: float = 0.5, text_temperature: float = 0.02, temperature: float = 0.2
) -> Tensor:
    """Return [P; alpha Q], how well each visual token (column) covers each text token and each visual token."""
    text_rows = [torch.softmax(unit(x) @ unit(word) / text_temperature, 0) / len(t) for word in t]
    visual_rows = [alpha * torch.softmax(unit(z) @ unit(token) / temperature, 0) / len(z) for token in z]
    return torch.stack(text_rows + visual_rows)


def naive(x: Tensor, z: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, features: str = "tower",
          a: Any = None, **options: Any) -> list[int]:  # fmt: skip
    """Greedy maximum coverage: each step adds the greatest sum over rows of max(0, A_j - best)."""
    covers, picks = table(x, z if features == "tower" else x, t, **options), []
    best = torch.zeros(len(covers), dtype=torch.float64)
    for _ in range(keep):
        picks.append(next_pick((covers - best[:, None]).clamp(min=0).sum(0), picks, kept, slack))
        best = torch.maximum(best, covers[:, picks[-1]])
    return picks


ROWS = {
    "mmtok": Picks(
        naive=naive,
        tried=({}, {"alpha": 2, "features": "projected"}, {"text_temperature": 0.1, "temperature": 0.05}),
        refused=({"alpha": -1}, {"temperature": 0}, {"text_temperature": 0}, {"features": "x"}, {"question": 1}),
        unchanged=("length of tokens", "order of text", "text twice"),
        slack=1e-4,
    )
}
