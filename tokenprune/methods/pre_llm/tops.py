# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from tokenprune.base import Pruner, Selection, Site
from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import Coverage, alike, first_largest
from tokenprune.kernels.pairs import Relation
from tokenprune.methods.scores import saliency
from tokenprune.options import check_options
from tokenprune.registry import register
from tokenprune.tokens import VisualTokens


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

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def encoder_layers(self) -> tuple[int, ...]:
        return (-1,)

    def select(self, tokens: VisualTokens) -> Selection:
        most = max(tokens.keep)

        def of(x: Tensor, mask: Tensor, number: Tensor, salient: Tensor) -> Tensor:
            coverage, rows = Coverage([Relation(alike(x, mask))], start=-1.0), torch.arange(len(x), device=x.device)
            barred, score = ~mask, salient
            for step in range(most):
                pick = first_largest(score.masked_fill(barred, -torch.inf))
                barred[rows, pick] |= step < number
                coverage.take(pick)  # which is covered by itself, as well as can be
                near, gain = coverage.cover[0], coverage.gain
                score = over_mean(salient, ~barred) + self.coverage * over_mean(gain, ~barred)
                score = score + self.diversity * over_mean((1 - near).clamp(min=0), ~barred)
            return barred & mask

        given = (tokens.hidden, tokens.mask, tokens.budget, saliency(tokens))
        return Selection(by_rows(of, 2 * tokens.mask.shape[1] ** 2, *given), counts=tokens.keep)


def over_mean(value: Tensor, left: Tensor) -> Tensor:
    """float `[S, N]`: `value`, at least 0, divided by its mean where `left` (bool `[S, N]`); 0 where that is 0."""
    mean = value.masked_fill(~left, 0).sum(1, keepdim=True) / left.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mean > 0, value / mean.masked_fill(mean <= 0, 1), 0)
