# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import unit
from tokenprune.methods.registry import register
from tokenprune.methods.scores import Centering, center_tokens, compute_relevance, get_center_needs, rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LOWEST = 1e-6  # relevance of the least relevant token, as a share of the range


@register("cdpruner", site=Site.PRE_LLM, paper="arXiv 2506.10967, NeurIPS 2025")
@dataclass(frozen=True)
class CDPruner(Pruner):
    """Keep the visual tokens that are most diverse given the question: a determinantal point process, taken greedily.

    The kernel is the cosine of two tokens times the relevance of either; the next pick raises the determinant of those
    taken most. A token is relevant as it is alike to the text after its image, on average, brought to the range from 0
    to 1.

    sign: 1 takes tokens that are alike to the text as relevant, -1 those that are not; the right one for a space of
    features is to be measured.
    theta: how much relevance weighs: 0 leaves it out (the choice then knows nothing of the question), 1 takes it as it
    is, and between them the weight is exp(theta / (2 - 2 theta) * relevance), which excludes no token.
    center: as in `divprune` (Cen-Prune): cosines without the image's mean, relevance times how distinct a token is.

    Source: "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs", the section
    on the method and the authors' code; `theta` as a comment in that code has it; `center` arXiv 2608.30263.

    Differs from the paper: relevance is measured between projected tokens and the input embeddings of the text, as
    other implementations do on Qwen-VL, because the paper's form for LLaVA needs the text tower of CLIP, which no such
    model holds. There the sign is contested (the authors negate CLIP's similarity), so it is an option; the authors'
    `theta` is 1. Relevance has the range of one image (the code's is that of all tiles of a batch); where all tokens
    are equally relevant, or there is no text, none weighs less than another; what depends on the picks is never picked
    twice but comes last, by relevance; tokens keep their positions.
    """

    query_free: ClassVar[Mapping[str, Any]] = {"theta": 0}
    fallback_options: ClassVar[Mapping[str, Any]] = {"center": "standardised"}

    sign: Literal[1, -1] = 1
    theta: Annotated[float, Ge(0), Le(1)] = 0.5
    center: Centering = False

    @property
    def query_aware(self) -> bool:
        return self.theta > 0

    @property
    def needs(self) -> frozenset[str]:
        return get_center_needs(self.center)

    def select(self, tokens: VisualTokens) -> Selection:
        x = tokens.hidden
        if self.theta > 0:
            weight = rescale(self.sign * compute_relevance(tokens), tokens.mask, above=_LOWEST)
        else:
            weight = tokens.mask.float()
        if 0 < self.theta < 1:
            # Less 1, which changes all by one factor, so that none is too large.
            weight = ((weight - 1) * (self.theta / (2 - 2 * self.theta))).exp()
        if self.center is not False:
            x, distinct = center_tokens(tokens, self.center)
            weight = weight * distinct
        most = max(tokens.keep)

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            weight = weight.masked_fill(~mask, 0)
            directions = unit(x)
            weighed = directions * weight.unsqueeze(2)
            own = weight.square() * directions.any(2)  # their length is 1, or 0
            return greedy_dpp(weighed, weighed, mask, number, most, 0.0, own)

        entries = x.shape[1] * (x.shape[2] + most)
        return Selection(by_rows(of, entries, x, tokens.mask, tokens.budget, weight), counts=tokens.keep)
