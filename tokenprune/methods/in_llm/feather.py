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
    """Keep a uniform grid and the best tokens by position-free attention (FEATHER).

    The score is the attention from the prompt's last token, computed without rotary embeddings: with them, attention
    favours the last rows of an image, which are close to the question. The first cut keeps a uniform grid and the
    tokens with the highest scores. The second cut, in a deeper layer, uses the scores only.

    `keep` is the average number of tokens over the decoder's layers. The default 0.36 is the authors' setting on 729
    tokens.

    Args:
        layers: Decoder layers of the two cuts. None: layers 8 and 16 of 32, scaled to the depth of the decoder.
        stride: Spacing of the uniform grid in rows and columns. It grows until the grid takes at most half of the
            budget. None: no grid.
        second: Share of the first cut's tokens that the second cut keeps, in (0, 1].

    Source:
        Endo et al., "Feather the Throttle: Revisiting Visual Token Pruning for Vision-Language Model Acceleration"
        (arXiv 2412.13180), section 5, and the authors' code: softmax over visual tokens only, averaged over heads, from
        the layer before the cut.

    Differences from the paper:
        - The first cut keeps exactly its budget, including the grid. The authors add the grid on top.
        - For images with an unknown grid, every stride * stride-th token is kept instead.
        - Each image has its own budget.

    Examples:
        >>> model = tokenprune.patch(model, Feather(stride=4), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        2
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
            score = score.nan_to_num(nan=-torch.inf).masked_fill(self._find_grid(tokens, self.stride), torch.inf)
        return Selection.top(score, tokens)

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        row = tokens.unrotated_last_row.float().masked_fill(~tokens.mask[:, None], 0)
        return (row / row.sum(2, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)).mean(1)

    def _find_grid(self, tokens: VisualTokens, min_stride: int) -> torch.Tensor:
        """Return the tokens on the uniform grid, shape (segments, tokens), bool. The stride grows from `min_stride`."""
        on_grid = torch.zeros(tokens.mask.shape, dtype=torch.bool, device="cpu")
        for row, (count, keep, grid) in enumerate(zip(tokens.counts, tokens.keep, tokens.grids, strict=True)):
            frames, height, width = grid or (1, 1, count)
            for stride in range(min_stride, max(height, width) + min_stride):
                down, across = (stride, stride) if grid else (1, stride * stride)
                if frames * -(-height // down) * -(-width // across) <= keep // 2:
                    on_grid[row, :count].view(frames, height, width)[:, ::down, ::across] = True
                    break
        return to_device(on_grid, tokens.mask.device)
