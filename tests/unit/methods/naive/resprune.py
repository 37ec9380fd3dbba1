# SPDX-License-Identifier: Apache-2.0
"""resprune: a loop written from its description, by explicit Gram-Schmidt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from greedy import next_pick, unit
from method_rows import Picks


def naive_relevance(x: Tensor, t: Tensor) -> Tensor:
    found = torch.stack([max(unit(one) @ unit(word) for word in t) for one in x])
    return (found - found.min()) / (found.max() - found.min()) + 1e-3


def naive(x: Tensor, t: Tensor, keep: int, kept: Any = (), slack: float = 0.0, alpha: float = 1.0,
          unit: bool = False, **_: Any) -> list[int]:  # fmt: skip
    x = x / x.norm(dim=1, keepdim=True) if unit else x
    weight = naive_relevance(x, t) ** alpha
    rest, picks, own = x.clone(), [], x.square().sum(1) * weight
    for _ in range(keep):
        energy = rest.square().sum(1) * weight
        j = next_pick(torch.where(energy > 1e-5 * own, energy, -1 / (1e-30 + own)), picks, kept, slack)
        picks.append(j)
        if energy[j] > 1e-5 * own[j]:
            direction = rest[j] / rest[j].norm()
            rest = rest - (rest @ direction)[:, None] * direction
    return picks


ROWS = {
    "resprune": Picks(
        naive=naive,
        tried=({}, {"alpha": 0.0}, {"unit": True}, {"alpha": 2.0}),
        refused=({"alpha": -1.0}, {"unit": 1}),
        unchanged=("unit of tokens", "order of text", "text twice"),
        slack=1e-3,
    ),
}
