# SPDX-License-Identifier: Apache-2.0
"""apet: a loop written from its description."""

from __future__ import annotations

import torch
from torch import Tensor

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens


def farthest(x: Tensor, number: int) -> list[int]:
    """The longest token, then again and again the one whose nearest among these is farthest away."""
    chosen: list[int] = []
    for _ in range(number):
        score = [min((float((one - x[j]).square().sum()) for j in chosen), default=float(one.norm())) for one in x]
        chosen.append(max((i for i in range(len(x)) if i not in chosen), key=lambda i: (score[i], -i)))
    return chosen


def errors(x: Tensor, basis: list[int]) -> list[float]:
    """How far each token is from what its coefficients make of the basis; what is but rounding is none."""
    s = x[basis]
    inverse = torch.linalg.inv(s @ s.T + 1e-5 * torch.eye(len(basis), dtype=x.dtype))
    found = [float((one - one @ s.T @ inverse @ s).norm()) for one in x]
    return [e if e >= 2**-16 * float(one.norm()) else 0.0 for e, one in zip(found, x, strict=True)]


def of_image(x: Tensor, keep: int, basis: int = 10) -> tuple[list[int], dict[int, int], list[int]]:
    """Return the tokens that stay, the one that each other token joins, and the basis."""
    if keep == len(x):
        return list(range(keep)), {}, []
    chosen = farthest(x, min(basis, keep - 1))
    error = errors(x, chosen)
    order = sorted(range(len(x)), key=lambda i: (-error[i], i))[:keep]
    stay, places = order[: keep - len(chosen)], sorted(order[keep - len(chosen) :])
    free, unit = [p for p in places if p not in chosen], x / x.norm(dim=1, keepdim=True)
    into = {s: free.pop(0) for s in chosen if s not in order}
    for i in range(len(x)):
        if i not in order and i not in chosen:
            into[i] = max(stay, key=lambda j: (round(float(unit[i] @ unit[j]), 6), -j))
    return sorted(order), into, chosen


def naive(
    tokens: VisualTokens, image: int, basis: int = 10, features: str = "projected", own: float = 0.0
) -> tuple[list[int], dict[int, int]]:
    x = tokens.encoder_features if features == "tower" else tokens.hidden
    return of_image(x[image, : tokens.counts[image]].double(), tokens.keep[image], basis)[:2]


ROWS = {
    "apet": Tower(
        naive=naive,
        tried=({}, {"basis": 1}, {"basis": 4, "features": "tower"}, {"own": 0.5, "features": "tower"}),
        papers=(((24, 24), 64), ((24, 24), 192), ((48, 60), 320)),
        refused=({"basis": 0}, {"own": 1.0}, {"own": -0.1}, {"features": "encoder"}, {"inner": 1}),
        unchanged=("unit of tokens", "turn of tokens", "text"),
        merges=True,
    )
}
