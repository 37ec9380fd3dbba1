# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import Coverage, cosine_products
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.picks import Picks
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("tops", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2606.27161 (reconstruction)")
@dataclass(frozen=True)
class Tops(Pruner):
    """Keep salient tokens that differ and cover the others (stage I of TOPS).

    The first pick has the most attention in the last block of the tower. Each further pick maximizes the sum of three
    criteria, each divided by its mean over the remaining tokens: this attention, the cosine distance to the nearest
    pick, and the gain in coverage of the remaining tokens. The choice does not depend on the question.

    Args:
        diversity: Weight of the distance (alpha in the paper).
        coverage: Weight of the coverage (lambda in the paper).

    Source:
        "TOPS: First-Principles Visual Token Pruning via Constructing Token Optimal Preservation Sets for Efficient MLLM
        Inference" (arXiv 2606.27161), Algorithm 1, with the defaults of its appendix. A reconstruction: no code was
        found.

    Differences from the paper:
        - Only stage I is implemented. Stage II cuts inside the language model by the attention of text tokens whose
          selection the paper does not define.
        - Criteria are divided by their means, as in the algorithm. The text of the paper uses ranges.
        - In towers without a class token, the attention of a patch is its mean over all queries.
        - Each image forms one set with all its tiles.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, Tops(diversity=1.0), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    diversity: Annotated[float, Ge(0)] = 0.5
    coverage: Annotated[float, Ge(0)] = 0.5

    def select(self, tokens: VisualTokens) -> Selection:
        max_tokens = max(tokens.keep)

        def pick_rows(
            x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor, saliency: torch.Tensor
        ) -> torch.Tensor:
            coverage, picks, score = Coverage([Relation(cosine_products(x, mask))], start=-1.0), Picks(mask), saliency
            for _ in range(max_tokens):
                coverage.take(picks.take_best(picks.mask_taken(score)))
                criteria = torch.stack([saliency, coverage.gain, (1 - coverage.cover[0]).clamp_(min=0)])
                relevance, gain, distance = divide_by_mean(criteria, picks.available)
                score = relevance + self.coverage * gain + self.diversity * distance
            return picks.first_picks(num_kept)

        inputs = (tokens.hidden, tokens.mask, tokens.budget, compute_saliency(tokens))
        return Selection(map_rows(pick_rows, 2 * tokens.mask.shape[1] ** 2, *inputs), counts=tokens.keep)


def divide_by_mean(value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Divide non-negative values (..., S, N) by their mean over `mask`, bool (S, N). Zero means give 0."""
    mean = (value * mask).sum(-1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return value / mean.masked_fill_(mean <= 0, torch.inf)
