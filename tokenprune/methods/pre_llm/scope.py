# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import alike, cover
from tokenprune.kernels.pairs import Relation
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("scope", site=Site.PRE_LLM, paper="arXiv 2510.24214, NeurIPS 2025")
@dataclass(frozen=True)
class Scope(Pruner):
    """Keep the visual tokens that cover the image best, and that the vision tower attends to (SCOPE).

    A token covers another as well as the two are alike by cosine. The next pick is the token with the largest product
    of what it adds to how well all tokens are covered and of its saliency, the attention that it gets in the tower's
    last block. The choice knows nothing of the question.

    alpha: power of the saliency; 0 chooses by coverage alone.
    features: what is compared, "projected" for the tokens as they enter the language model, "tower" for what the vision
    tower makes of each patch before the projector.

    Source: "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs", the section on the method;
    the authors' code, and AngelSlim's for towers without a class token.

    Differs from the paper: `features` is "projected" by default, as in AngelSlim, whose numbers on Qwen2.5-VL are of
    it, and the paper's is "tower"; cosines are taken in float32; each image is chosen from by itself with the budget of
    its own (the code gives each tile its part of K, rounded down); tokens keep their positions of the full prompt;
    newlines count as tokens without saliency and are taken last.
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"features": "projected"}

    alpha: Annotated[float, Ge(0)] = 1.0
    features: Literal["projected", "tower"] = "projected"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_attention"} | ({"encoder_features"} if self.features == "tower" else set()))

    def select(self, tokens: VisualTokens) -> Selection:
        most, salient = max(tokens.keep), compute_saliency(tokens)
        salient = salient / salient.amax(1, keepdim=True).clamp(min=1e-30)  # no power of it rounds to 0

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return cover([Relation(alike(x, mask))], mask, number, most, factor)

        x = tokens.encoder_features if self.features == "tower" else tokens.hidden
        given = (x, tokens.mask, tokens.budget, salient**self.alpha)
        return Selection(by_rows(of, 2 * x.shape[1] ** 2, *given), counts=tokens.keep)
