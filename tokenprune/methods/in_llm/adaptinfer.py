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
    """Keep the tokens that the question attends to, with dynamic weights of its words (AdaptInfer).

    The method makes three cuts in the decoder. At each cut, the score of a visual token is the attention it receives
    from the text tokens after the image. Each text token is weighted, per head, by the attention it exchanges with the
    other text tokens in the same layer. Images without following text are scored by the prompt's last token.

    `keep` is the average number of tokens over the decoder's layers. The default 0.25 matches the authors' "128 tokens"
    on LLaVA-1.5: about 146 of 576 tokens per layer.

    Args:
        layers: Decoder layers of the three cuts. A cut takes effect at the input of its layer. None: layers 2, 11 and
            21 of 32, scaled to the depth of the decoder.
        dynamic: Strength of the word weights, in [0, 1]. 0 weights all words equally, 1 weights them by attention.

    Source:
        Zhang et al., "AdaptInfer: Adaptive Token Pruning for Vision-Language Model Inference with Dynamical Text
        Guidance" (arXiv 2508.06084), and the authors' code for LLaVA. The code makes the attention symmetric and sums
        the weighted heads. "After layers 1, 10 and 20" in the paper is the input of layers 2, 11 and 21 here.

    Differences from the paper:
        - Token counts follow `keep` in the ratio 290 : 72 : 18 of the 128-token setting, instead of tables.
        - Kept tokens keep their positions. The authors renumber them after each cut.
        - At least one token of each image is kept.

    Examples:
        >>> model = tokenprune.patch(model, AdaptInfer(dynamic=0.5), keep=0.25)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        3
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.25
    depths = (2 / 32, 11 / 32, 21 / 32)
    sizes = (290.0, 72.0, 18.0)

    dynamic: Annotated[float, Ge(0), Le(1)] = 1.0

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        attention = tokens.text.attention  # [S, H, M, M]
        exchanged = attention.sum(2) + attention.sum(3) - attention.diagonal(dim1=2, dim2=3)
        num_words = tokens.text.mask.sum(1).clamp(min=1)[:, None, None]
        mean = exchanged.sum(2, keepdim=True) / num_words
        return sum_text_attention(tokens, self.dynamic * exchanged + (1 - self.dynamic) * mean).sum(1)
