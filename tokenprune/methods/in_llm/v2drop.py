# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tokenprune.methods.multi_cut import SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.tokens import VisualTokens


@register("v2drop", site=Site.IN_LLM, needs=("previous_hidden",), paper="arXiv 2509.01552, CVPR 2026")
@dataclass(frozen=True)
class V2Drop(SharedBudgetCuts):
    """Keep the visual tokens that the decoder layer before a cut changed most, and one or none for the last layers.

    The change is the length of the difference between what leaves the layer and what enters it. No attention is read,
    and the question, which comes after the image, changes nothing.

    keep: tokens averaged over the decoder's layers; 0.352 (default) is the schedule of the authors' code on LLaVA-1.5:
    576, 288, 144 and 1 of 576 tokens. The second cut keeps half as many as the first.
    layers: three decoder layers at whose input the cuts are made; None: 3, 17 and 22 of 32, in proportion.
    last: what the last cut keeps of an image, "one" token, or with "withdraw" none.

    Source: Chen et al., "Variation-aware Vision Token Dropping for Faster Large Vision-Language Models", and the
    authors' code: both residual branches of the layer, L2 norm.

    Differs from the paper: counts are solved from `keep`, with the shares of LLaVA-1.5 for all models (Qwen2-VL has
    a quarter, a twentieth of it and one token, after layers 3, 16 and 22 of 28); differences in float32; several
    images have a budget each.
    """

    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.352
    depths = (3 / 32, 17 / 32, 22 / 32)
    sizes = (1.0, 0.5, 1e-9)  # the least there is, which is one token

    last: Literal["one", "withdraw"] = "one"

    @property
    def least(self) -> int:  # type: ignore[override]  # one of its options decides
        return int(self.last == "one")

    def budget_at(self, cut: int, count: int, keep: int) -> int:
        return 0 if cut == 2 and self.last == "withdraw" else keep

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return (tokens.hidden.float() - tokens.previous_hidden.float()).norm(dim=-1)
