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
    """Drop tokens in stages by attention from the last prompt token (PyramidDrop).

    At each cut, the layer after the cut ranks the tokens: its softmax attention from the prompt's last token, averaged
    over heads.

    `keep` is the average number of tokens over the decoder's layers. The default 0.46875 is the paper's schedule: 576,
    288, 144 and 72 of 576 tokens, for a quarter of the layers each.

    Args:
        layers: Decoder layers of the cuts, one per entry of `ratios`. None: equally spaced (8, 16 and 24 of 32), and
            moved to earlier layers if `keep` requires it.
        ratios: Relative number of tokens that each cut keeps, in descending order.

    Source:
        Xing et al., "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy
        Reduction" (arXiv 2410.17247), section 3.2. The authors' code decides where the two differ: the layer after the
        cut ranks, by attention over the whole sequence.

    Differences from the paper:
        - Counts are solved from `keep` and rounded. The paper uses int(count * ratio), which is equal for multiples of
          8.
        - The paper does not state the layers and ratios of its averages of 192, 128 and 64 tokens. Here a smaller
          `keep` moves the cuts to earlier layers.
        - Kept tokens keep their positions. The authors renumber them after each cut.
        - Each image has its own budget, and batches may be padded on either side.

    Examples:
        >>> model = tokenprune.patch(model, PyramidDrop(layers=(2, 3, 4)), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        3
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.46875

    ratios: Sequence[Annotated[float, Gt(0), Le(1)]] = (0.5, 0.25, 0.125)

    def __post_init__(self) -> None:
        super().__post_init__()
        descending = all(earlier >= later for earlier, later in pairwise(self.ratios))
        self._check(bool(self.ratios) and descending, f"ratios={self.ratios!r} must be numbers in descending order")

    @property
    def depths(self) -> Sequence[float]:
        return [(index + 1) / (len(self.ratios) + 1) for index in range(len(self.ratios))]

    @property
    def sizes(self) -> Sequence[float]:
        return self.ratios

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.next_row_attention.mean(dim=1)
