# SPDX-License-Identifier: Apache-2.0
"""Naive loops of TOPS stage I (arXiv 2606.27161), IDSelection (2604.05601) and AgilePruner (2603.01236)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from greedy import cosine_table, next_pick
from method_rows import Picks


def naive_tops(x: Tensor, a: Tensor, keep: int, kept: Any = (), slack: float = 0.0, diversity: float = 0.5,
               coverage: float = 0.5, **_: Any) -> list[int]:  # fmt: skip
    """Algorithm 1: relevance, diversity and coverage, each divided by its mean over the unchosen tokens."""
    similarity = cosine_table(x)
    picks = [next_pick(a, [], kept, slack)]
    while len(picks) < keep:
        remaining = [i for i in range(len(x)) if i not in set(picks)]
        nearest = similarity[picks].amax(0)
        criteria = (
            a[remaining],
            (1 - nearest[remaining]).clamp(min=0),
            (similarity[remaining][:, remaining] - nearest[remaining]).clamp(min=0).sum(1),
        )
        relevance, diversity_term, coverage_term = (c / c.mean() if c.mean() > 0 else 0 * c for c in criteria)
        score = torch.full((len(x),), -math.inf, dtype=torch.float64)
        score[remaining] = relevance + diversity * diversity_term + coverage * coverage_term
        picks.append(next_pick(score, picks, kept, slack))
    return picks


def naive_idselection(x: Tensor, a: Tensor, keep: int, kept: Any = (), slack: float = 0.0, gamma: float = 20.0,
                      **_: Any) -> list[int]:  # fmt: skip
    """After each pick i, subtract exp(-gamma d_ij^2) s_i from every score s_j, with d = 1 - cos."""
    similarity, picks = cosine_table(x), []
    score = (a - a.min()) / (a.max() - a.min())
    for _ in range(keep):
        picks.append(next_pick(score, picks, kept, slack))
        score = score - torch.exp(-gamma * (1 - similarity[picks[-1]]) ** 2) * score[picks[-1]]
    return picks


def naive_agilepruner(x: Tensor, a: Tensor, keep: int, average_rank: float = 95.0, limit: float = 0.25,
                      filled: bool = True, **_: Any) -> list[int]:  # fmt: skip
    """Keep tokens by falling attention, and remove tokens closer than a threshold that grows with the rank."""
    values = torch.linalg.svdvals(x)
    share = values / values.sum()
    rank = math.exp(-sum(float(p) * math.log(p) for p in share if p > 0))
    order = sorted(range(len(x)), key=lambda i: (-a[i], i))
    similarity, removed, picks = cosine_table(x), set(), []
    for order_rank, i in enumerate(order, start=1):
        if i in removed or len(picks) == keep:
            continue
        picks.append(i)
        threshold = min(order_rank * rank / average_rank * 0.01, limit)
        removed |= {j for j in order[order_rank:] if 1 - similarity[i, j] < threshold}
    return picks + [i for i in order if i in removed][: keep - len(picks)] * filled


UNCHANGED = ("unit of tokens", "unit of attention", "text")
AGILE = ({}, {"limit": 0.9}, {"average_rank": 5.0, "limit": 0.6}, {"average_rank": 2.0, "limit": 0.1}, {"limit": 0})
ROWS = {
    "tops": Picks(
        naive=naive_tops,
        tried=({}, {"diversity": 2.0, "coverage": 0}, {"coverage": 3, "diversity": 0}),
        refused=({"diversity": -1}, {"coverage": math.nan}),
        unchanged=UNCHANGED,
        slack=1e-4,
    ),
    "idselection": Picks(
        naive=naive_idselection,
        tried=({}, {"gamma": 2.0}, {"gamma": 1000.0}),
        refused=({"gamma": -1},),
        unchanged=UNCHANGED,
        slack=1e-4,
    ),
    "agilepruner": Picks(
        naive=naive_agilepruner,
        tried=AGILE,
        refused=({"average_rank": 0}, {"limit": -0.1}),
        unchanged=UNCHANGED,
        nested=False,  # removed tokens fill the budget
    ),
}
