# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import finite
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("otprune", site=Site.PRE_LLM, paper="arXiv 2602.20205, CVPR 2026")
@dataclass(frozen=True)
class OTPrune(Pruner):
    """Keep the visual tokens whose distribution comes nearest to that of all (OTPrune): a log-determinant, taken
    greedily.

    Each feature is divided by its length over the image's tokens; V are the tokens then, and V V^T V V^T is how much
    two of them have in common in directions that the image has much of. The next pick raises log det(I + gamma V V^T V
    V^T) over those taken most. The choice knows nothing of the question.

    gamma: weight of what is in common beside the identity.

    Source: "OTPrune: Distribution-Aligned Visual Token Pruning via Optimal Transport", and the authors' code, both by
    description.

    Differs from the paper: each image is chosen from by itself; features that are 0 everywhere count nothing; tokens
    keep their positions; nothing is run again where the greedy choice stops early, since it does not.
    """

    gamma: Annotated[float, Gt(0)] = 0.01

    def select(self, tokens: VisualTokens) -> Selection:
        most = max(tokens.keep)

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            a, b = factor_gram_product(x, mask)
            return greedy_dpp(self.gamma * a, b, mask, number, most, ridge=1.0)

        count, width = tokens.hidden.shape[1:]
        keep = by_rows(of, count * (most + 3 * width), tokens.hidden, tokens.mask, tokens.budget)
        return Selection(keep, counts=tokens.keep)


def factor_gram_product(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float32 `[S, N, n]`, n the less of N and D, whose products of all pairs are V V^T V V^T; V are the
    tokens `[S, N, D]` with each feature divided by its length over those of `mask`. A token with NaN, and padding, is
    0."""
    real = mask & finite(x)
    v = x.float().masked_fill(~real.unsqueeze(2), 0)
    v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-12)
    if v.shape[2] < v.shape[1]:
        return v @ (v.transpose(1, 2) @ v), v
    gram = v @ v.transpose(1, 2)
    return gram, gram
