# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import cosine_products, greedy_cover
from tokenprune.kernels.pairs import Relation
from tokenprune.methods.registry import register
from tokenprune.methods.scores import compute_saliency
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("scope", site=Site.PRE_LLM, paper="arXiv 2510.24214, NeurIPS 2025")
@dataclass(frozen=True)
class Scope(Pruner):
    """Keep the visual tokens that cover the image best, weighted by tower attention.

    A token covers another token by their cosine. Each pick has the largest product of its coverage gain over all tokens
    and its saliency, which is its attention in the last block of the tower. The choice does not depend on the question.

    Args:
        alpha: Power of the saliency. 0 uses only coverage.
        features: Compared features: "projected" is the input of the language model, "tower" the tower's output before
            the projector.

    Source:
        "SCOPE: Saliency-Coverage Oriented Token Pruning for Efficient Multimodel LLMs" (arXiv 2510.24214), method
        section, the authors' code, and AngelSlim's code for towers without a class token.

    Differences from the paper:
        - The default `features` is "projected", as in AngelSlim and its results on Qwen2.5-VL. The paper uses "tower".
        - Cosines are computed in float32.
        - Each image has its own budget. The authors' code gives each tile its share, rounded down.
        - Kept tokens keep their positions in the prompt.
        - Newline tokens have no saliency and are kept last.

    Examples:
        >>> model = tokenprune.patch(model, Scope(alpha=0.5), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"features": "projected"}

    alpha: Annotated[float, Ge(0)] = 1.0
    features: Literal["projected", "tower"] = "projected"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"encoder_attention"} | ({"encoder_features"} if self.features == "tower" else set()))

    def select(self, tokens: VisualTokens) -> Selection:
        max_tokens, saliency = max(tokens.keep), compute_saliency(tokens)
        # A maximum of 1 keeps powers of the saliency from underflowing.
        saliency = saliency / saliency.amax(1, keepdim=True).clamp(min=1e-30)

        def pick_rows(
            x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor, factor: torch.Tensor
        ) -> torch.Tensor:
            return greedy_cover([Relation(cosine_products(x, mask))], mask, num_kept, max_tokens, factor)

        x = tokens.encoder_features if self.features == "tower" else tokens.hidden
        inputs = (x, tokens.mask, tokens.budget, saliency**self.alpha)
        return Selection(map_rows(pick_rows, 2 * x.shape[1] ** 2, *inputs), counts=tokens.keep)
