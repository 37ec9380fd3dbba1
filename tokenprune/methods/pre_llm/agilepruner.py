# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import cosine_products
from tokenprune.kernels.pairs import Relation, is_finite
from tokenprune.kernels.suppress import non_maximum_suppression
from tokenprune.kernels.take import adjust_count, rank_in_group
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_STEP = 0.01  # growth of the threshold per rank, for an image of average effective rank


@register(
    "agilepruner", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2603.01236, ICLR 2026 (reconstruction)"
)  # fmt: skip
@dataclass(frozen=True)
class AgilePruner(Pruner):
    """Keep salient tokens and drop tokens near a better token, with a wider gap on rich images.

    Tokens are visited by falling attention in the last block of the vision tower. A visited token is kept, and removes
    all tokens within a cosine distance of it. This distance grows with the token's rank and with the effective rank of
    the image's tokens. If too few tokens remain, the best removed tokens are restored. The choice does not depend on
    the question.

    Args:
        average_rank: Effective rank of an average image: exp of the entropy of the singular values. The default was
            measured on LLaVA's features; measure it again for other models.
        limit: Largest cosine distance within which tokens are removed. 0 keeps the tokens with the most attention.

    Source:
        "AgilePruner: An Empirical Study of Attention and Diversity for Adaptive Visual Token Pruning in Large
        Vision-Language Models" (arXiv 2603.01236). A reconstruction from summaries, the project page and a third-party
        port, which both defaults come from. The authors' code is not published.

    Differences from the paper:
        - Features are the projected tokens.
        - In towers without a class token, the attention of a patch is its mean over all queries.
        - All tiles of an image form one set.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, AgilePruner(limit=0.2), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True

    average_rank: Annotated[float, Gt(0)] = 95.0
    limit: Annotated[float, Ge(0)] = 0.25

    def select(self, tokens: VisualTokens) -> Selection:
        def pick_rows(
            x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor, salient: torch.Tensor
        ) -> torch.Tensor:
            rank = 1 + rank_in_group((~mask).byte(), salient)
            step = compute_effective_rank(x, mask).unsqueeze(1) / self.average_rank * _STEP
            threshold = (rank * step).clamp(max=self.limit)
            conflicts = Relation(
                cosine_products(x, mask), lambda similarity, threshold: 1 - similarity < threshold, threshold
            )
            return adjust_count(non_maximum_suppression(conflicts, salient, mask), salient, mask, num_kept)

        inputs = (tokens.hidden, tokens.mask, tokens.budget, compute_saliency(tokens))
        return Selection(map_rows(pick_rows, tokens.mask.shape[1] ** 2, *inputs), counts=tokens.keep)


def compute_effective_rank(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return exp of the entropy of the normalized singular values of each segment, float32 (S,).

    The device is synchronized. Tokens with NaN are ignored.

    Args:
        x: Tokens, shape (S, N, D).
        mask: Valid tokens, bool (S, N).
    """
    x = x.double().masked_fill(~(mask & is_finite(x)).unsqueeze(2), 0)
    shorter = x if x.shape[1] <= x.shape[2] else x.transpose(1, 2)
    values = torch.linalg.eigvalsh(shorter @ shorter.transpose(1, 2)).clamp(min=0).sqrt()
    share = values / values.sum(1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(share).sum(1).exp().float()
