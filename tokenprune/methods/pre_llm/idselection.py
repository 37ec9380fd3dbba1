# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import alike
from tokenprune.kernels.pairs import PickedRows
from tokenprune.kernels.picks import Picks
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency, rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("idselection", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2604.05601 (reconstruction)")
@dataclass(frozen=True)
class IDSelection(Pruner):
    """Keep the visual tokens that the vision tower attends to, each pick lowering the score of those like it.

    The score is the attention that a token gets in the tower's last block, brought to the range from 0 to 1. The next
    pick is the highest; from every other score the pick's is taken off, times exp(-gamma * distance squared), the
    distance being 1 - cosine. The choice knows nothing of the question.

    gamma: how near tokens must be to lower each other's score; the larger, the nearer.

    Source: "ID-Selection: Importance-Diversity Based Visual Token Selection for Efficient LVLM Inference". A
    reconstruction, from the abstract, summaries and another project's port; no official code was found.

    Differs from the paper: towers without a class token give the attention that a patch receives on average (the paper
    goes into the language model there). Scores may fall below 0, as the formula has it, while the port stops them at 0,
    where all ties go to the image's top. Where all scores are alike, they are 1. Each image is one set; tokens keep
    their positions.
    """

    gamma: Annotated[float, Ge(0)] = 20.0

    def select(self, tokens: VisualTokens) -> Selection:
        most = max(tokens.keep)

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
            picks, row_of = Picks(mask), PickedRows(alike(x, mask))
            for _ in range(most):
                left = picks.among_left(score)
                pick = picks.take_best(left)
                lowers = (-self.gamma * (1 - row_of(pick, left)).square()).exp()
                score = score - lowers * score.gather(1, pick.unsqueeze(1))
            return picks.first(number)

        score = rescale(compute_saliency(tokens), tokens.mask)
        given = (tokens.hidden, tokens.mask, tokens.budget, score)
        return Selection(by_rows(of, tokens.hidden[0].numel(), *given), counts=tokens.keep)
