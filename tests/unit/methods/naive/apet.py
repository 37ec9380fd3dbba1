# SPDX-License-Identifier: Apache-2.0
"""Naive loop of APET (arXiv 2602.19870)."""

from __future__ import annotations

import torch
from torch import Tensor

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens


def farthest(x: Tensor, count: int) -> list[int]:
    """Sample the farthest points, starting at the token of greatest norm."""
    chosen: list[int] = []
    for _ in range(count):
        score = [
            min((float((token - x[j]).square().sum()) for j in chosen), default=float(token.norm())) for token in x
        ]
        chosen.append(max((i for i in range(len(x)) if i not in chosen), key=lambda i: (score[i], -i)))
    return chosen


def errors(x: Tensor, basis: list[int]) -> list[float]:
    """Return each token's distance from its ridge projection onto the basis. Rounding errors count as 0."""
    s = x[basis]
    inverse = torch.linalg.inv(s @ s.T + 1e-5 * torch.eye(len(basis), dtype=x.dtype))
    residuals = [float((token - token @ s.T @ inverse @ s).norm()) for token in x]
    return [e if e >= 2**-16 * float(token.norm()) else 0.0 for e, token in zip(residuals, x, strict=True)]


def of_image(x: Tensor, keep: int, basis: int = 10) -> tuple[list[int], dict[int, int], list[int]]:
    """Return the kept tokens, the target of each merged token, and the basis.

    The basis replaces the kept tokens of smallest error. Other dropped tokens join the most similar kept token outside
    the basis.
    """
    if keep == len(x):
        return list(range(keep)), {}, []
    basis_tokens = farthest(x, min(basis, keep - 1))
    error = errors(x, basis_tokens)
    order = sorted(range(len(x)), key=lambda i: (-error[i], i))[:keep]
    anchors, weakest = order[: keep - len(basis_tokens)], sorted(order[keep - len(basis_tokens) :])
    free_slots, unit = [p for p in weakest if p not in basis_tokens], x / x.norm(dim=1, keepdim=True)
    targets = {s: free_slots.pop(0) for s in basis_tokens if s not in order}
    for i in range(len(x)):
        if i not in order and i not in basis_tokens:
            targets[i] = max(anchors, key=lambda j: (round(float(unit[i] @ unit[j]), 6), -j))
    return sorted(order), targets, basis_tokens


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
