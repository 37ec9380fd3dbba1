# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import choose_layers
from tokenprune.errors import BudgetError
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_INPUTS = (2 / 28, 17 / 28)  # depths of the two cuts of the second stage


@register("erase", site=Site.PRE_LLM, needs=("patch_entropy",), paper="arXiv 2605.09982")
@dataclass(frozen=True)
class Erase(Pruner):
    """Drop flat image regions and tokens with little text attention.

    The complexity of an image is the median entropy of its tokens' pixels. Its level is the index of the first
    threshold below the median, or the last level. The first stage keeps a share of the tokens that depends on the
    level, by entropy. The second stage keeps the tokens with the most attention from the text: after an early decoder
    layer if all images of the prompt are simple, otherwise after a late layer. Pass `processor=` to `patch`: it
    provides the pixels.

    `keep` is the share after the second cut, not an average over layers.

    Args:
        entropy: Thresholds between the levels in nats, not rising.
        retain: Share of the tokens that enters the decoder, one value per level and one more than thresholds. At least
            `keep` is retained. The defaults of `entropy` and `retain` are the authors' for Qwen2.5-VL-7B at keep=0.25.
            For Qwen3-VL-8B they use entropy=(1.610, 0.227, 0.056), retain=(0.845, 0.776, 0.757, 0.194) and layers=(3,
            21).
        layers: Two decoder layers (early, late), counted from 0. The second stage cuts after one of the two. None uses
            layers 1 and 16 of 28, scaled to the depth of the decoder.

    Source:
        "ERASE: Eliminating Redundant Visual Tokens via Adaptive Two-Stage Token Pruning" (arXiv 2605.09982), from a
        description of the authors' code. The text of the paper was not read.

    Differences from the paper:
        - Caches of the layers before a cut keep all tokens. The authors' code cuts these caches too, so decoding is
          cheaper there.
        - Each image has its own budget at the second cut.
        - The text is everything after the image, or the last prompt token if no text follows. The authors use all but
          the first 15 tokens of the prompt.
        - Queries are the layer's own. The authors' code omits the query norm.
        - Constants for other models must be found by the user.

    Examples:
        >>> tokenprune.method("erase", layers=(3, 21))
        erase(layers=(3, 21))
    """

    query_aware: ClassVar[bool] = True
    syncs_device: ClassVar[bool] = True
    chooses_count: ClassVar[bool] = True

    entropy: Sequence[Annotated[float, Ge(0)]] = (1.690, 1.347, 1.172)
    retain: Sequence[Annotated[float, Gt(0), Le(1)]] = (0.827, 0.751, 0.495, 0.403)
    layers: Sequence[Annotated[int, Ge(0)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_falling = all(previous >= later for previous, later in pairwise(self.entropy))
        self._check(is_falling, f"entropy={self.entropy!r} must not rise")
        num_levels = len(self.entropy) + 1
        self._check(
            len(self.retain) == num_levels, f"retain={self.retain!r} must have {num_levels} shares, one per level"
        )
        is_pair = self.layers is None or (len(self.layers) == 2 and self.layers[0] < self.layers[1])
        self._check(is_pair, f"layers={self.layers!r} must be two rising decoder layers, (early, late)")

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.keep is None or budget.per != "image":
            raise BudgetError(
                f"erase does not support {budget}: pixels set the budget of its first layers. Pass keep with "
                'per="image".'
            )
        if self.layers is None:
            inputs = choose_layers(_INPUTS, layers, Budget(keep=1.0))
        else:
            inputs = [layer + 1 for layer in self.layers]
            is_in_range = inputs[1] < layers
            self._check(
                is_in_range, f"layers={self.layers!r} is out of range: the last of {layers} layers is {layers - 1}"
            )
        keep_all = Budget(keep=1.0)  # the first stage plans the counts
        return [(self, budget), *((_PlannedTextCut(index, layer), keep_all) for index, layer in enumerate(inputs))]

    def select(self, tokens: VisualTokens) -> Selection:
        entropy = tokens.patch_entropy.float()
        levels = self.compute_levels(entropy, tokens).tolist()  # synchronizes with the device
        upper = (len(self.retain) + 1) // 2
        late = {row for row, level in zip(tokens.segments.row, levels, strict=True) if level < upper}
        counts, planned = [], []
        each = zip(tokens.counts, tokens.keep, levels, tokens.segments.row, strict=True)
        for count, keep, level, row in each:
            counts.append(max(int(count * self.retain[level]), keep))
            planned.append((counts[-1] if row in late else keep, keep))
        tokens.remember("counts", planned)
        return Selection(top_mask(entropy, tokens.mask, to_device(counts, entropy.device), max(counts)), counts=counts)

    def compute_levels(self, entropy: torch.Tensor, tokens: VisualTokens) -> torch.Tensor:
        """Return the complexity level of each image, long (S,); level 0 is the most complex.

        Args:
            entropy: Pixel entropy of each token, float32 (S, N).
            tokens: Visual tokens, for their counts and mask.
        """
        rising = entropy.masked_fill(~tokens.mask, torch.inf).sort(1).values
        middle = to_device([[(count - 1) // 2] for count in tokens.counts], entropy.device)
        thresholds = torch.tensor([*self.entropy], dtype=torch.float32, device=entropy.device)
        return (~(rising.gather(1, middle) > thresholds)).sum(1)


@dataclass(frozen=True)
class _PlannedTextCut(Pruner):
    """Second stage: keep the tokens with the most text attention, as many as the first stage planned.

    Args:
        index: Index of this cut, 0 (early) or 1 (late).
        layer: Decoder layer whose input is cut.
    """

    name: ClassVar[str] = "erase"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = TEXT_ATTENTION
    query_aware: ClassVar[bool] = True
    chooses_count: ClassVar[bool] = True

    index: int
    layer: int

    def select(self, tokens: VisualTokens) -> Selection:
        planned = [counts_of_image[self.index] for counts_of_image in tokens.carry["counts"]]
        counts = [min(count, planned_count) for count, planned_count in zip(tokens.counts, planned, strict=True)]
        if counts == tokens.counts:
            return Selection(tokens.mask, counts=counts)
        score = sum_text_attention(tokens, tokens.text.mask.float()).mean(1)
        return Selection(top_mask(score, tokens.mask, to_device(counts, score.device), max(counts)), counts=counts)
