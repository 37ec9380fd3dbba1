# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.methods.multi_cut import TEXT_ATTENTION, SharedBudgetCuts, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.tokens import VisualTokens


@register("adaptinfer", site=Site.IN_LLM, needs=TEXT_ATTENTION, paper="arXiv 2508.06084")
@dataclass(frozen=True)
class AdaptInfer(SharedBudgetCuts):
    """Keep the visual tokens that the question attends to, each of its words weighted by what the other words make of
    it in the same layer.

    A word weighs, in each head, what it gets of and gives to the words after the image; at every cut anew.

    keep: tokens averaged over the decoder's layers; 0.25 (default) is what layers process of 576 tokens in the
    authors' "128 tokens" of LLaVA-1.5, about 146.
    layers: three decoder layers at whose input the cuts are made; None: 2, 11 and 21 of 32, in proportion.
    dynamic: in [0, 1]; 0 weighs all words alike, 1 by their attention, and what is between mixes the two.

    Source: Zhang et al., "AdaptInfer: Adaptive Token Pruning for Vision-Language Model Inference with Dynamical Text
    Guidance", and the authors' code for LLaVA: attention is made symmetric, and heads are summed with their weights.
    "After layers 1, 10 and 20" there is at the input of 2, 11 and 21 here.

    Differs from the paper: counts follow `keep` by the profile of its 128 tokens, 290 : 72 : 18, and not tables; kept
    tokens keep their positions (there they are numbered anew after each cut); at least one token of an image stays.
    Where no text is after an image, the prompt's last token rates.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.25
    depths = (2 / 32, 11 / 32, 21 / 32)
    sizes = (290.0, 72.0, 18.0)

    dynamic: Annotated[float, Ge(0), Le(1)] = 1.0

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        among = tokens.text.attention  # [S, H, M, M]
        got_and_gave = among.sum(2) + among.sum(3) - among.diagonal(dim1=2, dim2=3)
        words = tokens.text.mask.sum(1).clamp(min=1)[:, None, None]
        mean = got_and_gave.sum(2, keepdim=True) / words
        return sum_text_attention(tokens, self.dynamic * got_and_gave + (1 - self.dynamic) * mean).sum(1)
