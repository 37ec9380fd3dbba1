# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import is_finite
from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("otprune", site=Site.PRE_LLM, paper="arXiv 2602.20205, CVPR 2026")
@dataclass(frozen=True)
class OTPrune(Pruner):
    """Keep the tokens whose distribution best matches all tokens.

    Each feature is divided by its norm over the image's tokens, which gives V. The matrix V V^T V V^T compares tokens
    in the dominant directions of the image. Each pick greedily maximizes log det(I + gamma V V^T V V^T) over the picks.
    The choice does not depend on the question.

    Args:
        gamma: Weight of the matrix relative to the identity.

    Source:
        "OTPrune: Distribution-Aligned Visual Token Pruning via Optimal Transport" (arXiv 2602.20205), from descriptions
        of the paper and the authors' code.

    Differences from the paper:
        - Each image is pruned by itself.
        - Features that are 0 for every token are ignored.
        - Kept tokens keep their positions in the prompt.
        - The greedy search never stops early, so it is not restarted.

    Examples:
        >>> model = tokenprune.patch(model, OTPrune(), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    gamma: Annotated[float, Gt(0)] = 0.01

    def select(self, tokens: VisualTokens) -> Selection:
        max_tokens = max(tokens.keep)

        def pick_rows(x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
            a, b = factor_gram_product(x, mask)
            return greedy_dpp(self.gamma * a, b, mask, num_kept, max_tokens, ridge=1.0)

        count, width = tokens.hidden.shape[1:]
        keep = map_rows(pick_rows, count * (max_tokens + 3 * width), tokens.hidden, tokens.mask, tokens.budget)
        return Selection(keep, counts=tokens.keep)


def factor_gram_product(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two factors, float32 (S, N, n) with n = min(N, D), whose product is V V^T V V^T.

    V holds the tokens with each feature divided by its norm over the segment. Padding and tokens with NaN are 0.

    Args:
        x: Tokens, (S, N, D).
        mask: Valid tokens, bool (S, N).
    """
    valid = mask & is_finite(x)
    v = x.float().masked_fill(~valid.unsqueeze(2), 0)
    v = v / v.norm(dim=1, keepdim=True).clamp(min=1e-12)
    if v.shape[2] < v.shape[1]:
        return v @ (v.transpose(1, 2) @ v), v
    gram = v @ v.transpose(1, 2)
    return gram, gram
