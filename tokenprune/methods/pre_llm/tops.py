# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import Coverage, alike
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.picks import Picks
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("tops", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2606.27161 (reconstruction)")
@dataclass(frozen=True)
class Tops(Pruner):
    """Keep the visual tokens that are relevant, differ from those kept, and cover those that are not (stage I of TOPS).

    The first pick is the token that the vision tower's last block attends to most. Each further one has the largest sum
    of three criteria, each divided by its mean over what is left: that attention; the cosine distance to the nearest
    pick; and how much better the tokens that are left would be covered. The choice knows nothing of the question.

    diversity: weight of the distance (alpha in the paper).
    coverage: weight of the coverage (lambda in the paper).

    Source: "TOPS: First-Principles Visual Token Pruning via Constructing Token Optimal Preservation Sets for Efficient
    MLLM Inference", Algorithm 1, with the defaults of its appendix. A reconstruction: no code was found.

    Differs from the paper: it is stage I alone; stage II cuts inside the language model by the attention of text tokens
    whose choice the paper does not define. Criteria are divided by their means, as in the algorithm, where the text
    speaks of ranges. A tower without a class token gives the attention that a patch receives on average; each image is
    one set, with all its tiles; tokens keep their positions.
    """

    diversity: Annotated[float, Ge(0)] = 0.5
    coverage: Annotated[float, Ge(0)] = 0.5

    def select(self, tokens: VisualTokens) -> Selection:
        most = max(tokens.keep)

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, salient: torch.Tensor) -> torch.Tensor:
            coverage, picks, score = Coverage([Relation(alike(x, mask))], start=-1.0), Picks(mask), salient
            for _ in range(most):
                coverage.take(picks.take_best(picks.among_left(score)))  # which is covered by itself, as well as can be
                criteria = torch.stack([salient, coverage.gain, (1 - coverage.cover[0]).clamp_(min=0)])
                relevance, gain, distance = divide_by_mean(criteria, picks.left)
                score = relevance + self.coverage * gain + self.diversity * distance
            return picks.first(number)

        given = (tokens.hidden, tokens.mask, tokens.budget, compute_saliency(tokens))
        return Selection(by_rows(of, 2 * tokens.mask.shape[1] ** 2, *given), counts=tokens.keep)


def divide_by_mean(value: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """float `[..., S, N]`: `value`, at least 0, divided by its mean where `left` (bool `[S, N]`); 0 where that is 0."""
    mean = (value * left).sum(-1, keepdim=True) / left.sum(1, keepdim=True).clamp(min=1)
    return value / mean.masked_fill_(mean <= 0, torch.inf)
