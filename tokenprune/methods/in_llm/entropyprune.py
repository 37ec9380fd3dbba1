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

_LEAST = 1e-10  # of an eigenvalue
_ELEMENTS = 2**22  # of the matrices that are decomposed at a time


@register("entropyprune", site=Site.IN_LLM, paper="arXiv 2602.17196, EMNLP 2026 Findings")
@dataclass(frozen=True)
class EntropyPrune(Pruner):
    """Keep the visual tokens whose heads differ most in what they ask, by the entropy of a token's query heads
    (EntropyPrune).

    A token's states are centred over its heads, and the eigenvalues l of their products, over the number of heads H,
    give -sum l ln l / ln H. Rotary embedding has no influence on it. The choice knows nothing of the question.

    layer: int >= 1, the decoder layer at whose input the cut is made, by states of the layer before it.
    states: "queries", "keys" or "values" of the layer; with grouped heads, H is the number of those.
    normalise: divide the eigenvalues by their sum, so that their size says nothing: an entropy from 0 to 1. The
    authors do not: there, long queries make the value fall, below 0 as well.

    Source: "EntropyPrune: Matrix Entropy Guided Visual Token Pruning for Multimodal Large Language Models", a
    description of the authors' code; the paper's text was not read.

    Differs from the paper: `normalise` is ours. Each image has a budget. Heads wider than 128 are taken as they are
    (there neighbours are averaged to 128). Eigenvalues are those of float64, as there. How the authors find the layer,
    where the mean entropy falls most, is left to the user.
    """

    asks_device: ClassVar[bool] = True  # whether the eigenvalues were found

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
        step = max(1, _ELEMENTS // (heads.shape[2] * max(heads.shape[2:])))
        parts = [compute_entropies(part, self.normalise) for part in heads.flatten(0, 1).split(step)]
        return torch.cat(parts).view(tokens.mask.shape)


def compute_entropies(heads: torch.Tensor, normalise: bool = False) -> torch.Tensor:
    """float64 `[n]`: the matrix entropy of each token, NaN for one that is not finite. heads: `[n, H, Dh]`."""
    number = heads.shape[1]
    x = heads.double()
    real = x.isfinite().all(dim=2).all(dim=1)
    x = x.masked_fill(~real[:, None, None], 0)
    x = x - x.mean(1, keepdim=True)
    # The eigenvalues that the smaller of the two tables of products leaves out are 0.
    table = x @ x.transpose(1, 2) if number <= x.shape[2] else x.transpose(1, 2) @ x
    values = torch.linalg.eigvalsh(table / number).clamp(min=_LEAST)
    if normalise:
        values = values / values.sum(1, keepdim=True)
    found = -(values * values.log()).sum(1) / math.log(max(2, number))
    return found.masked_fill(~real, torch.nan)
