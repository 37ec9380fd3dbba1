# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.dpp import greedy_dpp
from tokenprune.kernels.pairs import normalize
from tokenprune.methods.registry import register
from tokenprune.methods.scores import Centering, center_tokens, compute_relevance, get_center_needs, rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_MIN_RELEVANCE = 1e-6  # of the least relevant token, after rescaling


@register("cdpruner", site=Site.PRE_LLM, paper="arXiv 2506.10967, NeurIPS 2025")
@dataclass(frozen=True)
class CDPruner(Pruner):
    """Keep diverse tokens relevant to the question: a greedy determinantal point process.

    The kernel is the cosine of two tokens multiplied by the relevance of both. Each pick maximizes the determinant of
    the picked tokens' kernel. The relevance of a token is its mean cosine to the text after the image, rescaled to [0,
    1] over the image.

    Args:
        sign: 1 treats tokens similar to the text as relevant, -1 dissimilar tokens. The better sign depends on the
            feature space, so measure it.
        theta: Strength of relevance. 0 disables it, and the choice does not depend on the question. 1 uses the
            relevance directly. Values in between weight a token by exp(theta / (2 - 2 theta) * relevance), which
            excludes no token.
        center: Compare tokens after subtracting the mean of the image, and multiply relevance by distinctness; see
            `DivPrune`.

    Source:
        Zhang et al., "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs"
        (arXiv 2506.10967), method section and the authors' code. `theta` follows a comment in that code. `center` is
        from arXiv 2608.30263.

    Differences from the paper:
        - Relevance compares projected tokens with the text's input embeddings, as other implementations do on Qwen-VL.
          The paper's form for LLaVA needs CLIP's text tower, which the model does not contain.
        - The authors negate CLIP's similarity. The right sign for embeddings is disputed, so it is an option.
        - The authors use `theta` = 1.
        - Relevance is rescaled over one image. The authors' code rescales it over all tiles of a batch.
        - If all tokens are equally relevant, or without text, every token has weight 1.
        - Tokens that depend linearly on the picks come last, by relevance, and are never picked twice.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, CDPruner(theta=0.5), keep=0.25)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).keep_ratio
        0.25
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
            weight = rescale(self.sign * compute_relevance(tokens), tokens.mask, above=_MIN_RELEVANCE)
        else:
            weight = tokens.mask.float()
        if 0 < self.theta < 1:
            # Subtracting 1 scales all weights by one factor and avoids overflow.
            weight = ((weight - 1) * (self.theta / (2 - 2 * self.theta))).exp()
        if self.center is not False:
            x, distinct = center_tokens(tokens, self.center)
            weight = weight * distinct
        max_tokens = max(tokens.keep)

        def pick_rows(
            x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor:
            weight = weight.masked_fill(~mask, 0)
            directions = normalize(x)
            weighted = directions * weight.unsqueeze(2)
            diagonal = weight.square() * directions.any(2)  # unit vectors, or zeros
            return greedy_dpp(weighted, weighted, mask, num_kept, max_tokens, 0.0, diagonal)

        entries = x.shape[1] * (x.shape[2] + max_tokens)
        return Selection(map_rows(pick_rows, entries, x, tokens.mask, tokens.budget, weight), counts=tokens.keep)
