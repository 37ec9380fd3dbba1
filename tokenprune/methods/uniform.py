# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenprune.base import Pruner, Selection, Site
from tokenprune.registry import register
from tokenprune.tokens import VisualTokens


@register("uniform", site=Site.PRE_LLM, paper="none (baseline)")
@dataclass(frozen=True)
class Uniform(Pruner):
    """Keep visual tokens at even distances in raster order: a baseline that covers the whole picture."""

    def select(self, tokens: VisualTokens) -> Selection:
        # The j-th of k picks is the middle of the j-th of k equal stretches. Integers only: exact for any size.
        pick = torch.arange(tokens.mask.shape[1], device=tokens.mask.device)
        budget = tokens.budget[:, None]
        counts = tokens.mask.sum(1, keepdim=True)
        index = ((2 * pick + 1) * counts).div(2 * budget.clamp(min=1), rounding_mode="floor")
        wanted = (pick < budget) & tokens.mask
        keep = torch.zeros(tokens.mask.shape[0], tokens.mask.shape[1] + 1, dtype=torch.bool, device=tokens.mask.device)
        keep.scatter_(1, torch.where(wanted, index, tokens.mask.shape[1]), True)
        return Selection(keep[:, :-1] & tokens.mask, counts=tokens.keep)
