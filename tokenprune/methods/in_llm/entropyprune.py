# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Site
from tokenprune.selection.tokens import VisualTokens

_MIN_EIGENVALUE = 1e-10  # minimum of an eigenvalue
_MAX_ELEMENTS = 2**22  # matrix elements per batch of the eigendecomposition


@register("entropyprune", site=Site.IN_LLM, paper="arXiv 2602.17196, EMNLP 2026 Findings")
@dataclass(frozen=True)
class EntropyPrune(Pruner):
    """Keep the tokens with the highest entropy of their query heads (EntropyPrune).

    The heads of a token's query are centred. With the eigenvalues l of their Gram matrix divided by the number of heads
    H, the score is -sum(l ln l) / ln H. Rotary embeddings do not change it. The selection does not depend on the
    question.

    Args:
        layer: First decoder layer that runs on the kept tokens. The layer before it provides the states.
        states: States that are scored: "queries", "keys" or "values". With grouped heads, H is the number of groups.
        normalise: Divide the eigenvalues by their sum, so that the entropy lies in [0, 1] and ignores the length of the
            states. Without it, as in the paper, long queries lower the score, even below 0.

    Source:
        "EntropyPrune: Matrix Entropy Guided Visual Token Pruning for Multimodal Large Language Models"
        (arXiv 2602.17196). Implemented from a description of the authors' code; the paper's text was not available.

    Differences from the paper:
        - `normalise` is an addition.
        - Each image has its own budget.
        - Heads wider than 128 are used unchanged. The authors average neighbouring channels down to 128.
        - `layer` is an option. The authors use the layer with the steepest fall of the mean entropy.

    Examples:
        >>> model = tokenprune.patch(model, EntropyPrune(layer=2, states="keys"), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True  # eigvalsh checks for convergence on the host

    layer: Annotated[int, Ge(1)] = 2
    states: Literal["queries", "keys", "values"] = "queries"
    normalise: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self._observable})

    @property
    def _observable(self) -> str:
        return {"queries": "query_heads", "keys": "key_heads", "values": "value_heads"}[self.states]

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        heads = getattr(tokens, self._observable)
        step = max(1, _MAX_ELEMENTS // (heads.shape[2] * max(heads.shape[2:])))
        parts = [compute_entropies(part, self.normalise) for part in heads.flatten(0, 1).split(step)]
        return torch.cat(parts).view(tokens.mask.shape)


def compute_entropies(heads: torch.Tensor, normalise: bool = False) -> torch.Tensor:
    """Return the matrix entropy of each token, shape (tokens,), float64. Tokens with non-finite states get NaN.

    Args:
        heads: States of the tokens, shape (tokens, heads, head size).
        normalise: Divide the eigenvalues by their sum.
    """
    num_heads = heads.shape[1]
    x = heads.double()
    finite = x.isfinite().all(dim=2).all(dim=1)
    x = x.masked_fill(~finite[:, None, None], 0)
    x = x - x.mean(1, keepdim=True)
    # Both Gram matrices have the same non-zero eigenvalues. Decompose the smaller one.
    table = x @ x.transpose(1, 2) if num_heads <= x.shape[2] else x.transpose(1, 2) @ x
    values = torch.linalg.eigvalsh(table / num_heads).clamp(min=_MIN_EIGENVALUE)
    if normalise:
        values = values / values.sum(1, keepdim=True)
    entropy = -(values * values.log()).sum(1) / math.log(max(2, num_heads))
    return entropy.masked_fill(~finite, torch.nan)
