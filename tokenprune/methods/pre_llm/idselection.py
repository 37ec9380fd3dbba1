# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import cosine_products
from tokenprune.kernels.pairs import PickedRows
from tokenprune.kernels.picks import Picks
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency, rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("idselection", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2604.05601 (reconstruction)")
@dataclass(frozen=True)
class IDSelection(Pruner):
    """Keep salient tokens one by one, each pick lowering the score of similar tokens.

    The score of a token is its attention in the last block of the tower, rescaled to [0, 1]. Each step picks the
    highest score. It then subtracts from every other score the pick's score times exp(-gamma * d^2), where d is the
    cosine distance to the pick. The choice does not depend on the question.

    Args:
        gamma: Sharpness of the suppression. Larger values suppress only nearer tokens.

    Source:
        "ID-Selection: Importance-Diversity Based Visual Token Selection for Efficient LVLM Inference" (arXiv
        2604.05601). A reconstruction from the abstract, summaries and a third-party port; no official code was found.

    Differences from the paper:
        - In towers without a class token, the attention of a patch is its mean over all queries. The paper uses the
          language model's attention instead.
        - Scores may become negative, as in the formula. The port clamps them at 0, where all ties go to the top of the
          image.
        - If all scores are equal, they are 1.
        - Each image forms one set.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, IDSelection(gamma=10.0), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    gamma: Annotated[float, Ge(0)] = 20.0

    def select(self, tokens: VisualTokens) -> Selection:
        max_tokens = max(tokens.keep)

        def pick_rows(x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
            picks, row_of = Picks(mask), PickedRows(cosine_products(x, mask))
            for _ in range(max_tokens):
                candidates = picks.mask_taken(score)
                pick = picks.take_best(candidates)
                penalty = (-self.gamma * (1 - row_of(pick, candidates)).square()).exp()
                score = score - penalty * score.gather(1, pick.unsqueeze(1))
            return picks.first_picks(num_kept)

        score = rescale(compute_saliency(tokens), tokens.mask)
        inputs = (tokens.hidden, tokens.mask, tokens.budget, score)
        return Selection(map_rows(pick_rows, tokens.hidden[0].numel(), *inputs), counts=tokens.keep)
