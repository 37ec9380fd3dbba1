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
    """Keep the visual tokens that the prompt's last token attends to most, after the first decoder layers.

    layer: int >= 1, K of the paper: layers 0 .. K-1 see all tokens, and the attention of layer K-1 ranks them.
    query: "last" ranks by the attention row of the last prompt token (mean over heads), as the authors' code does;
    "all" by the mean attention received from all tokens that come after, as the paper's text says.

    Source: Chen et al., "An Image is Worth 1/2 Tokens After Layer 2", section 4.

    Differs from the paper: the ranking is made once, in prefill, and kept while decoding (the authors' variant with a
    KV cache does the same; their first one ranks anew at every token). Several images have a budget each; the authors'
    code knows one span. Batches, padding and any attention back end work: only the rows that are needed are recomputed
    from queries and keys.
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
