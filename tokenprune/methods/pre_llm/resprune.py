# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import cosines
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import is_finite, normalize
from tokenprune.methods.registry import register
from tokenprune.methods.scores import rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_TINY = 1e-37  # near the smallest normal float32
_MIN_RELEVANCE = 1e-3  # of the least relevant token, after rescaling


@register("resprune", site=Site.PRE_LLM, paper="arXiv 2603.21105 (notes of others)", reconstruction=True)
@dataclass(frozen=True)
class ResPrune(Pruner):
    """Pick tokens with the largest residual to earlier picks, weighted by relevance.

    Each pick maximizes its squared residual times r^alpha. r is the largest cosine of the token to a token of the text
    after the image, rescaled to [0.001, 1.001] over the image.

    Args:
        alpha: Power of the relevance. 0 disables it, and the choice does not depend on the question.
        unit: Normalize all tokens to unit length first.

    Source:
        "ResPrune: Text-Conditioned Subspace Reconstruction for Visual Token Pruning in Large Vision-Language Models"
        (arXiv 2603.21105). A reconstruction from notes that quote its formulas; neither the text nor code was
        available.

    Differences from the paper:
        - `alpha`, the rescaling of cosines and unnormalized tokens are decisions of this implementation.
        - Relevance uses all tokens of the text. The paper uses the nouns.
        - Tokens inside the span of the picks come last, by squared norm times r^alpha.

    Examples:
        >>> model = tokenprune.patch(model, ResPrune(alpha=2.0), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_free: ClassVar[Mapping[str, Any]] = {"alpha": 0}

    alpha: Annotated[float, Ge(0)] = 1.0
    unit: bool = False

    @property
    def query_aware(self) -> bool:
        return self.alpha > 0

    def select(self, tokens: VisualTokens) -> Selection:
        x = tokens.hidden.float()
        x = normalize(x) if self.unit else x.masked_fill(~is_finite(x).unsqueeze(2), 0)
        # A common scale does not change the picks, and it avoids overflow of squares.
        x = x / x.masked_fill(~tokens.mask.unsqueeze(2), 0).abs().amax((1, 2), keepdim=True).clamp(min=_TINY)
        # Scaling a vector scales its residual by the same factor.
        weighted, max_tokens = x * self._relevance(tokens).pow(self.alpha / 2).unsqueeze(2), max(tokens.keep)

        def pick_rows(x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor) -> torch.Tensor:
            return greedy_dpp(x, x, mask, num_kept, max_tokens)

        entries = x.shape[1] * (x.shape[2] + max_tokens)
        return Selection(map_rows(pick_rows, entries, weighted, tokens.mask, tokens.budget), counts=tokens.keep)

    def _relevance(self, tokens: VisualTokens) -> torch.Tensor:
        """Return the positive relevance of each token, float32 (S, N). It is 1 for padding or without text."""
        text = tokens.text
        if not self.alpha or not text.mask.shape[1]:
            return torch.ones(tokens.mask.shape, dtype=torch.float32, device=tokens.mask.device)
        similarity = cosines(tokens.hidden, text.hidden, tokens.mask).masked_fill(~text.mask.unsqueeze(1), -1)
        relevance = rescale(similarity.amax(2), tokens.mask) + _MIN_RELEVANCE
        return relevance.masked_fill(~tokens.mask, 1)
