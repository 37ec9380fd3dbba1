# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tokenprune.kernels.clusters import select_farthest_weighted
from tokenprune.kernels.farthest import farthest
from tokenprune.methods.registry import register
from tokenprune.methods.scores import Centering, center_tokens, get_center_needs
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("divprune", site=Site.PRE_LLM, paper="arXiv 2503.02175, CVPR 2025")
@dataclass(frozen=True)
class DivPrune(Pruner):
    """Keep the visual tokens that differ most from each other: greedy max-min cosine distance.

    The first pick is the token whose nearest neighbor is farthest away. Each further pick is the token farthest from
    all earlier picks. The choice does not depend on the question.

    Args:
        center: Subtract the mean of the image's tokens before comparing them, and multiply each distance by the token's
            distinctness, which falls with its mean cosine to the other tokens (Cen-Prune). True uses the tokens
            directly. "standardised" first divides each feature by its standard deviation over the image. "tower" does
            the same with the tower's output before the projector, as the paper does for Qwen2.5-VL.

    Source:
        Alvar et al., "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models" (arXiv 2503.02175),
        Algorithm 1. For `center`: Wen, Lee and Choi, "Centering before Pruning: Lightweight Geometry Correction for
        Diversity-Based Visual Token Pruning in LVLMs" (arXiv 2608.30263), without published code.

    Differences from the paper:
        - Distances are computed in float32.
        - A token is never picked twice. The authors' code can do so if all remaining tokens are duplicates.
        - Kept tokens keep their positions in the prompt. The authors' LLaVA code renumbers them.
        - Each image is pruned by itself.
        - The minimum distance is updated after each pick instead of recomputed over all picks.
        - `center` uses the mean of the whole image, not of a tile. If all tokens are equally distinct, they have equal
          weights. "standardised" on projected tokens is an addition.

    Examples:
        >>> model = tokenprune.patch(model, DivPrune(center=True), keep=0.25)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).keep_ratio
        0.25
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"center": "standardised"}

    center: Centering = False

    @property
    def needs(self) -> frozenset[str]:
        return get_center_needs(self.center)

    def select(self, tokens: VisualTokens) -> Selection:
        max_tokens = max(tokens.keep)
        if self.center is False:
            keep = farthest(tokens.hidden, tokens.mask, tokens.budget, max_tokens)
        else:
            centered, distinctness = center_tokens(tokens, self.center)
            keep = select_farthest_weighted(
                centered, tokens.mask, distinctness, tokens.budget, max_tokens, weigh_first=False
            )
        return Selection(keep, counts=tokens.keep)
