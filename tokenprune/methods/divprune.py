# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tokenprune.base import Method, Selection, Site
from tokenprune.registry import register
from tokenprune.tokens import VisualTokens


@register("divprune", site=Site.PRE_LLM, paper="arXiv 2503.02175, CVPR 2025")
@dataclass(frozen=True)
class DivPrune(Method):
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


def farthest(features: Tensor, mask: Tensor, budget: Tensor, most: int) -> Tensor:
    """Greedy farthest-point selection by cosine distance; returns bool `[S, N]`.

    features: `[S, N, D]`; mask: bool `[S, N]`; budget: long `[S]`; most: the largest budget. Ties go to the lower
    index.
    """
    unit = normalize(features.float(), dim=-1)
    taken = torch.zeros_like(mask)
    nearest = _nearest_other(unit, mask)
    for step in range(most):
        # -inf bars what is taken or padding, whatever the distances are.
        pick = nearest.masked_fill(taken | ~mask, -torch.inf).argmax(dim=1, keepdim=True)
        taken.scatter_(1, pick, taken.gather(1, pick) | (step < budget[:, None]))
        distance = 1 - (
            unit @ unit.gather(1, pick.unsqueeze(-1).expand(-1, -1, unit.shape[-1])).transpose(1, 2)
        ).squeeze(-1)
        nearest = distance if step == 0 else torch.minimum(nearest, distance)
    return taken & mask


def _nearest_other(unit: Tensor, mask: Tensor) -> Tensor:
    """float `[S, N]`: cosine distance of each token to its nearest other token; a lone token gets +inf."""
    distance = 1 - unit @ unit.transpose(1, 2)
    distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
    return distance.masked_fill(~mask[:, None, :], torch.inf).amin(dim=2)
