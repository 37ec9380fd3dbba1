# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import cosines
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import finite, unit
from tokenprune.methods.registry import register
from tokenprune.methods.scores import rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_TINY = 1e-37  # the shortest length of float32, all but
_LOWEST = 1e-3  # relevance of the least relevant token, as a share of the range


@register("resprune", site=Site.PRE_LLM, paper="arXiv 2603.21105 (notes of others)", reconstruction=True)
@dataclass(frozen=True)
class ResPrune(Pruner):
    """Keep, one after the other, the visual token of which most is left outside the span of those taken, weighed by how
    much it is like a word of the text after its image (ResPrune).

    The next pick has the largest squared length of what is left times r^alpha, where r is the greatest cosine to a
    token of the text, brought to the range from 0.001 to 1.001 over the image.

    alpha: how much relevance weighs; 0 leaves it out, and the choice then knows nothing of the question.
    unit: take all tokens as equally long.

    Source: "ResPrune: Text-Conditioned Subspace Reconstruction for Visual Token Pruning in Large Vision-Language
    Models", by notes that quote its formulas.

    Differs from the paper: neither its text nor code was to be had, so this is a reconstruction. alpha, how cosines
    become positive, and that tokens are not made equally long first, are ours; relevance is to all tokens of the text,
    there to its nouns. What the picks span already comes last, by its squared length times r^alpha.
    """

    query_free: ClassVar[Mapping[str, Any]] = {"alpha": 0}

    alpha: Annotated[float, Ge(0)] = 1.0
    unit: bool = False

    @property
    def query_aware(self) -> bool:
        return self.alpha > 0

    def select(self, tokens: VisualTokens) -> Selection:
        x = tokens.hidden.float()
        x = unit(x) if self.unit else x.masked_fill(~finite(x).unsqueeze(2), 0)
        # A common length changes nothing, and keeps squares in range.
        x = x / x.masked_fill(~tokens.mask.unsqueeze(2), 0).abs().amax((1, 2), keepdim=True).clamp(min=_TINY)
        # Of vectors that are scaled, what is left outside a span is scaled as well.
        weighed, most = x * self._relevance(tokens).pow(self.alpha / 2).unsqueeze(2), max(tokens.keep)

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            return greedy_dpp(x, x, mask, number, most)

        entries = x.shape[1] * (x.shape[2] + most)
        return Selection(by_rows(of, entries, weighed, tokens.mask, tokens.budget), counts=tokens.keep)

    def _relevance(self, tokens: VisualTokens) -> torch.Tensor:
        """float32 `[S, N]`, above 0: of each token, 1 where it is padding or there is no text."""
        text = tokens.text
        if not self.alpha or not text.mask.shape[1]:
            return torch.ones(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
        alike = cosines(tokens.hidden, text.hidden, tokens.mask).masked_fill(~text.mask.unsqueeze(1), -1)
        found = rescale(alike.amax(2), tokens.mask) + _LOWEST
        return found.masked_fill(~tokens.mask, 1)
