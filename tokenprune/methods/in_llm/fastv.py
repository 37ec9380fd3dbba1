# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge

from tokenprune.methods.registry import register
from tokenprune.selection.method import Pruner, Site
from tokenprune.selection.tokens import VisualTokens


@register("fastv", site=Site.IN_LLM, paper="arXiv 2403.06764, ECCV 2024")
@dataclass(frozen=True)
class FastV(Pruner):
    """Keep the tokens that the prompt's last token attends to most (FastV).

    Tokens are ranked once, in prefill, by the attention of an early decoder layer, averaged over heads. All later
    layers run on the kept tokens.

    Args:
        layer: First decoder layer that runs on the kept tokens (K in the paper). Layer K - 1 provides the attention.
        query: "last": attention from the last prompt token, as in the authors' code. "all": mean attention from all
            later tokens, as in the paper's text.

    Source:
        Chen et al., "An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for Large
        Vision-Language Models" (arXiv 2403.06764), section 4.

    Differences from the paper:
        - The ranking from prefill is kept during decoding, as in the authors' KV cache variant. Their first variant
          ranks again for every generated token.
        - Each image has its own budget. The authors' code supports one span of visual tokens.
        - Batches, padding and all attention backends are supported: the required attention rows are recomputed from
          queries and keys.

    Examples:
        >>> model = tokenprune.patch(model, FastV(layer=2), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_per_layer
        [256, 256, 64, 64, 64, 64]
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True

    layer: Annotated[int, Ge(1)] = 2
    query: Literal["last", "all"] = "last"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"last_row_attention" if self.query == "last" else "received_attention"})

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        attention = tokens.last_row_attention if self.query == "last" else tokens.received_attention
        return attention.mean(dim=1)
