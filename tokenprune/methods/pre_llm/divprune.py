# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

from tokenprune.base import Pruner, Selection, Site
from tokenprune.kernels.farthest import farthest
from tokenprune.registry import register
from tokenprune.tokens import VisualTokens


@register("divprune", site=Site.PRE_LLM, paper="arXiv 2503.02175, CVPR 2025")
@dataclass(frozen=True)
class DivPrune(Pruner):
    """Keep the visual tokens that differ most from each other: greedy max-min cosine distance.

    The first pick is the token whose nearest other token is farthest away; each further one is the token farthest from
    all picks so far. The choice knows nothing of the question.

    Source: Alvar et al., "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models", Algorithm 1.

    Differs from the paper: distances are taken in float32; a token is never picked twice (the authors' code can, when
    all that is left are duplicates); kept tokens keep their positions of the full prompt (the authors' LLaVA code
    renumbers them); every image is chosen from by itself; the minimum distance is kept up to date instead of being
    taken anew over all picks.
    """

    def select(self, tokens: VisualTokens) -> Selection:
        keep = farthest(tokens.hidden, tokens.mask, tokens.budget, max(tokens.keep))
        return Selection(keep, counts=tokens.keep)
