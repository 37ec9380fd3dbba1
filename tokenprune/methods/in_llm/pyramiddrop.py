# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le

from tokenprune.methods.multi_cut import SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Site
from tokenprune.selection.tokens import VisualTokens


@register("pyramiddrop", site=Site.IN_LLM, needs=("next_row_attention",), paper="arXiv 2410.17247, CVPR 2025")
@dataclass(frozen=True)
class PyramidDrop(SharedBudgetCuts):
    """Drop visual tokens in stages, ever more with depth, by what the prompt's last token attends to in the next layer.

    keep: tokens averaged over the decoder's layers; 0.46875 (default) is the paper's schedule, 576, 288, 144 and 72 of
    576 tokens for a quarter of the layers each.
    layers: decoder layers at whose input the cuts are made, as many as `ratios`; None: after a quarter, half and three
    quarters of them (8, 16 and 24 of 32), all earlier in proportion where `keep` is too small for that.
    ratios: what each cut keeps, in proportion to the others, not rising.

    Source: Xing et al., "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy
    Reduction", section 3.2, and the authors' code where the two differ: the layer after the cut ranks, by its softmax
    attention over the whole sequence, mean over heads.

    Differs from the paper: counts are solved from `keep` and rounded (there `int(count * ratio)`, which is the same
    where 8 divides the number of tokens); which layers and ratios the paper's averages of 192, 128 and 64 tokens have
    is not said, so that `keep` moves the cuts; kept tokens keep their positions (there they are numbered anew after
    each cut); several images have a budget each, and batches may be padded on either side.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.46875

    ratios: Sequence[Annotated[float, Gt(0), Le(1)]] = (0.5, 0.25, 0.125)

    def __post_init__(self) -> None:
        super().__post_init__()
        falls = all(one >= later for one, later in pairwise(self.ratios))
        self._check(bool(self.ratios) and falls, f"ratios={self.ratios!r} must be numbers that do not rise")

    @property
    def depths(self) -> Sequence[float]:
        return [(number + 1) / (len(self.ratios) + 1) for number in range(len(self.ratios))]

    @property
    def sizes(self) -> Sequence[float]:
        return self.ratios

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.next_row_attention.mean(dim=1)
