# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tokenprune.kernels.clusters import farthest_weighted
from tokenprune.kernels.farthest import farthest
from tokenprune.methods.registry import register
from tokenprune.methods.scores import Centering, center_tokens, get_center_needs
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("divprune", site=Site.PRE_LLM, paper="arXiv 2503.02175, CVPR 2025")
@dataclass(frozen=True)
class DivPrune(Pruner):
    """Keep the visual tokens that differ most from each other: greedy max-min cosine distance.

    The first pick is the token whose nearest other token is farthest away; each further one is the token farthest from
    all picks so far. The choice knows nothing of the question.

    center: True takes the image's mean from its tokens before they are compared, and weighs each distance by how
    distinct the token is, that is, how little alike to the others on average (Cen-Prune); "standardised" and "tower"
    are as the paper has it on Qwen2.5-VL, where features are divided by their spread over the image first, of the
    projected tokens or of what the vision tower makes of each patch.

    Source: Alvar et al., "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models", Algorithm 1; for
    `center` Wen, Lee and Choi, "Centering before Pruning: Lightweight Geometry Correction for Diversity-Based Visual
    Token Pruning in LVLMs", arXiv 2608.30263, whose authors published no code.

    Differs from the paper: distances are taken in float32; a token is never picked twice (the authors' code can, when
    all that is left are duplicates); kept tokens keep their positions of the full prompt (the authors' LLaVA code
    renumbers them); every image is chosen from by itself; the minimum distance is kept up to date instead of being
    taken anew over all picks. Of `center`: the mean is that of the whole image, not of a tile; where all tokens are
    equally distinct, none weighs less than another; "standardised" on projected tokens is ours.
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"center": "standardised"}

    center: Centering = False

    @property
    def needs(self) -> frozenset[str]:
        return get_center_needs(self.center)

    def select(self, tokens: VisualTokens) -> Selection:
        most = max(tokens.keep)
        if self.center is False:
            keep = farthest(tokens.hidden, tokens.mask, tokens.budget, most)
        else:
            left, distinct = center_tokens(tokens, self.center)
            keep = farthest_weighted(left, tokens.mask, distinct, tokens.budget, most, weigh_first=False)
        return Selection(keep, counts=tokens.keep)
