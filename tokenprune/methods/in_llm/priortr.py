# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Site
from tokenprune.selection.tokens import VisualTokens

_EPSILON = 1e-10  # of the authors' code


@register("priortr", site=Site.IN_LLM, paper="arXiv 2606.24156, ECCV 2026")
@dataclass(frozen=True)
class PriorTR(Pruner):
    """Keep the tokens that the question attends to more than the model does without a question (PriorTR).

    The first token after the image cannot attend to the question, so its attention is a prior Q. The attention P of the
    prompt's last token depends on the question. Both are averaged over heads and normalized over the image, and a token
    scores P log(P / Q). All later layers run on the kept tokens.

    Args:
        layer: First decoder layer that runs on the kept tokens. Layer `layer` - 1 provides both attentions.
        query: "last": P is the attention of the prompt's last token. "question": P is the mean attention of all text
            tokens after the image, as the authors' code does for LLaVA-1.5.

    Source:
        Chen et al., "Accelerating Multimodal Large Language Models with Prior-Corrected Token Reduction" (arXiv
        2606.24156), and the authors' code for LLaVA-1.5 and Qwen2-VL. The paper's text was not available.

    Differences from the paper:
        - Q is the attention of the first token after the image in all families. The authors use the second token for
          InternVL2.5.
        - Without text after an image Q is 0, and the attention of the last token ranks the tokens.
        - Each image has its own budget and its own prior. The authors' code supports one span of visual tokens.
        - "question" includes the prompt's last token in all families. The authors leave it out for Qwen2-VL.

    Examples:
        >>> model = tokenprune.patch(model, PriorTR(layer=3), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_per_layer
        [256, 256, 256, 64, 64, 64]
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True

    layer: Annotated[int, Ge(1)] = 3
    query: Literal["last", "question"] = "last"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"first_row_attention", "last_row_attention" if self.query == "last" else "text_attention"})

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        if self.query == "last":
            attention = tokens.last_row_attention
        else:
            attention = tokens.attention_from(torch.ones_like(tokens.text.mask, dtype=torch.float32))
        posterior = _normalize(attention, tokens.mask)
        prior = _normalize(tokens.first_row_attention, tokens.mask)
        return posterior * ((posterior + _EPSILON) / (prior + _EPSILON)).log()


def _normalize(attention: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the heads as a distribution over the tokens of each segment, shape (S, N), float32."""
    mean = attention.float().mean(1).masked_fill(~mask, 0)
    return mean / (mean.sum(1, keepdim=True) + _EPSILON)
