# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("feather", site=Site.IN_LLM, needs=("unrotated_last_row",), paper="arXiv 2412.13180, ICCV 2025")
@dataclass(frozen=True)
class Feather(SharedBudgetCuts):
    """Keep an even grid, and of the rest what the prompt's last token attends to whatever the distance; later, and from
    a deeper layer, only the latter (FEATHER).

    Attention is computed without rotary positions, which favour what stands near the question, the image's last rows.

    keep: tokens averaged over the decoder's layers; 0.36 (default) is the authors' setting on 729 tokens.
    layers: two decoder layers at whose input the cuts are made; None: 8 and 16 of 32, in proportion.
    stride: int >= 1, the first cut keeps every such row and column of the grid, the first among them; None keeps none
    for their place.
    second: share in (0, 1] of the first cut's tokens that the second one keeps.

    Source: Endo et al., "Feather the Throttle: Revisiting Visual Token Pruning for Vision-Language Model
    Acceleration", section 5, and the authors' code: softmax over visual columns alone, mean over heads, of the layer
    before the cut.

    Differs from the paper: the first cut keeps exactly its budget, even grid included (there the grid comes on top, of
    which score picks some too). The stride grows until the grid takes at most half of what is kept. Where the shape of
    an image is not known, every stride * stride-th token stands for the grid. Several images have a budget each.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.36
    depths = (0.25, 0.5)

    stride: Annotated[int, Ge(1)] | None = 3
    second: Annotated[float, Gt(0), Le(1)] = 0.09

    @property
    def sizes(self) -> tuple[float, float]:
        return 1.0, self.second

    def choose(self, tokens: VisualTokens, cut: int) -> Selection:
        score = self.score(tokens)
        if cut == 0 and self.stride is not None:
            score = score.nan_to_num(nan=-torch.inf).masked_fill(self._even(tokens, self.stride), torch.inf)
        return Selection.top(score, tokens)

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        row = tokens.unrotated_last_row.float().masked_fill(~tokens.mask[:, None], 0)
        return (row / row.sum(2, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)).mean(1)

    def _even(self, tokens: VisualTokens, least: int) -> torch.Tensor:
        """bool `[S, N]`: the tokens of the first cut that stay for their place. least: the stride to begin with."""
        even = torch.zeros(tokens.mask.shape, dtype=torch.bool, device="cpu")
        for row, (count, keep, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            frames, height, width = grid or (1, 1, count)
            for stride in range(least, max(height, width) + least):
                down, across = (stride, stride) if grid else (1, stride * stride)
                if frames * -(-height // down) * -(-width // across) <= keep // 2:
                    even[row, :count].view(frames, height, width)[:, ::down, ::across] = True
                    break
        return to_device(even, tokens.mask.device)
