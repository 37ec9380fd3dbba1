# SPDX-License-Identifier: Apache-2.0
"""mmtok: a loop written from its description."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greedy import next_pick, unit
from method_rows import Picks


def table(
    x: Tensor, z: Tensor, t: Tensor, alpha: float = 0.5, text_temperature: float = 0.02, temperature: float = 0.2
) -> Tensor:
    """How well each visual token (column) covers each text token, then each visual one."""
    said = [torch.softmax(unit(x) @ unit(word) / text_temperature, 0) / len(t) for word in t]
    seen = [alpha * torch.softmax(unit(z) @ unit(one) / temperature, 0) / len(z) for one in z]
    return torch.stack(said + seen)


def naive(x: Tensor, z: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, features: str = "tower",
          a: Any = None, **more: Any) -> list[int]:  # fmt: skip
    covers, picks = table(x, z if features == "tower" else x, t, **more), []
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
