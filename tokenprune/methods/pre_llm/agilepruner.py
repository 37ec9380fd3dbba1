# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import alike
from tokenprune.kernels.pairs import Relation, finite
from tokenprune.kernels.suppress import unsuppressed
from tokenprune.kernels.take import rank_in_group, settle
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_STEP = 0.01  # distance that the threshold grows by with each rank, in an image of average rank


@register(
    "agilepruner", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2603.01236, ICLR 2026 (reconstruction)"
)  # fmt: skip
@dataclass(frozen=True)
class AgilePruner(Pruner):
    """Keep the visual tokens that the vision tower attends to, without those near a better one; the richer an image,
    the wider the gap.

    Tokens are gone through by falling attention in the tower's last block. One that is still there stays, and removes
    those within a cosine distance of it that grows with its place in that order, and with the effective rank of the
    image's tokens. Where too few are left, the best of the removed ones come back. The choice knows nothing of the
    question.

    average_rank: effective rank (exp of the entropy of the singular values) of an average image; the paper's is of
    LLaVA's features, so measure it for others.
    limit: largest distance within which tokens are removed; 0 keeps what is attended to most.

    Source: "AgilePruner: An Empirical Study of Attention and Diversity for Adaptive Visual Token Pruning in Large
    Vision-Language Models". A reconstruction, from summaries, the project's page and another project's port, on which
    both defaults rest; the authors' code is not published.

    Differs from the paper: features are the projected tokens; towers without a class token give the attention that a
    patch receives on average; each image is one set with all its tiles; tokens keep their positions.
    """

    asks_device: ClassVar[bool] = True

    average_rank: Annotated[float, Gt(0)] = 95.0
    limit: Annotated[float, Ge(0)] = 0.25

    def select(self, tokens: VisualTokens) -> Selection:
        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, salient: torch.Tensor) -> torch.Tensor:
            place = 1 + rank_in_group((~mask).byte(), salient)
            base = compute_effective_rank(x, mask).unsqueeze(1) / self.average_rank * _STEP
            threshold = (place * base).clamp(max=self.limit)
            near = Relation(alike(x, mask), lambda alike, threshold: 1 - alike < threshold, threshold)
            return settle(unsuppressed(near, salient, mask), salient, mask, number)

        given = (tokens.hidden, tokens.mask, tokens.budget, compute_saliency(tokens))
        return Selection(by_rows(of, tokens.mask.shape[1] ** 2, *given), counts=tokens.keep)


def compute_effective_rank(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """float32 `[S]`: exp of the entropy of the singular values of the tokens `[S, N, D]` of `mask`, as shares of their
    sum; from 1 to the rank. A token with NaN is left out. Waits for the device."""
    x = x.double().masked_fill(~(mask & finite(x)).unsqueeze(2), 0)
    short = x if x.shape[1] <= x.shape[2] else x.transpose(1, 2)
    values = torch.linalg.eigvalsh(short @ short.transpose(1, 2)).clamp(min=0).sqrt()
    share = values / values.sum(1, keepdim=True).clamp(min=1e-300)
    return torch.special.entr(share).sum(1).exp().float()
