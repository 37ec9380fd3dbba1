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
    """Keep the tokens that the layer before a cut changes most (V2Drop).

    The change of a token is the L2 norm of the difference between the layer's output and input. Three cuts keep fewer
    and fewer tokens; the last layers see one token or none. The selection reads no attention and does not depend on the
    question, because the question follows the image.

    `keep` is the average number of tokens over the decoder's layers. The default 0.352 is the schedule of the authors'
    code on LLaVA-1.5: 576, 288, 144 and 1 of 576 tokens. The second cut keeps half of the first.

    Args:
        layers: Decoder layers of the three cuts. None: layers 3, 17 and 22 of 32, scaled to the depth of the decoder.
        last: Tokens after the last cut: "one" token per image, or none with "withdraw".

    Source:
        Chen et al., "Variation-aware Vision Token Dropping for Faster Large Vision-Language Models" (arXiv 2509.01552),
        and the authors' code: both residual branches of the layer, L2 norm.

    Differences from the paper:
        - Counts are solved from `keep`, with the ratios of LLaVA-1.5 for all models. The authors' Qwen2-VL schedule
          keeps a quarter, a twentieth of that, and one token after layers 3, 16 and 22 of 28.
        - Differences are computed in float32.
        - Each image has its own budget.

    Examples:
        >>> model = tokenprune.patch(model, V2Drop(last="withdraw"), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        0
    """

    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.352
    depths = (3 / 32, 17 / 32, 22 / 32)
    sizes = (1.0, 0.5, 1e-9)  # the last size rounds to the minimum of one token

    last: Literal["one", "withdraw"] = "one"

    @property
    def min_tokens(self) -> int:  # type: ignore[override]  # a property, because an option decides
        return int(self.last == "one")

    def budget_at(self, cut: int, count: int, keep: int) -> int:
        return 0 if cut == 2 and self.last == "withdraw" else keep

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return (tokens.hidden.float() - tokens.previous_hidden.float()).norm(dim=-1)
