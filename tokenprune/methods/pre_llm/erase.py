# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import place
from tokenprune.errors import BudgetError
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_INPUTS = (2 / 28, 17 / 28)  # of the layers after which the text cuts


@register("erase", site=Site.PRE_LLM, needs=("patch_entropy",), paper="arXiv 2605.09982")
@dataclass(frozen=True)
class Erase(Pruner):
    """Drop flat parts of an image before the decoder, and what the text attends to least inside it: early where the
    image is simple, late where it is complex (ERASE).

    An image is as complex as the median entropy of its tokens' pixels: its level is the first whose threshold the
    median exceeds, else the last. It takes `processor=`, which knows the colours.

    keep: what is left after the second cut, no average over the layers.
    entropy: thresholds of the levels in nats, not rising. retain: the share that enters the decoder, a number for each
    level, one more than thresholds; at least `keep`. The defaults are the authors' for Qwen2.5-VL-7B at keep=0.25; for
    Qwen3-VL-8B they are entropy=(1.610, 0.227, 0.056), retain=(0.845, 0.776, 0.757, 0.194), layers=(3, 21).
    layers: two decoder layers, (early, late), counted from 0: after the late one prompts are cut that hold an image of
    the upper half of the levels, after the early one all others. None: 1 and 16 of 28, in proportion.

    Source: "ERASE: Eliminating Redundant Visual Tokens via Adaptive Two-Stage Token Pruning", by a description of the
    authors' code; the paper's text was not read.

    Differs from the paper: caches of layers before a cut keep what entered them (the code cuts these too, so that
    decoding costs more here); each image has its own budget at the second cut; the text is that after the image (there
    all but the prompt's first 15 tokens), the prompt's last token where there is none; queries are the layer's own (the
    code leaves out its norm); levels beyond the two models' constants are the user's to find.
    """

    query_aware: ClassVar[bool] = True
    asks_device: ClassVar[bool] = True
    by_content_count: ClassVar[bool] = True

    entropy: Sequence[Annotated[float, Ge(0)]] = (1.690, 1.347, 1.172)
    retain: Sequence[Annotated[float, Gt(0), Le(1)]] = (0.827, 0.751, 0.495, 0.403)
    layers: Sequence[Annotated[int, Ge(0)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        falls = all(one >= later for one, later in pairwise(self.entropy))
        self._check(falls, f"entropy={self.entropy!r} must be thresholds that do not rise")
        number = len(self.entropy) + 1
        self._check(len(self.retain) == number, f"retain={self.retain!r} must be {number} shares, one for each level")
        two = self.layers is None or (len(self.layers) == 2 and self.layers[0] < self.layers[1])
        self._check(two, f"layers={self.layers!r} must be two decoder layers, (early, late)")

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.keep is None or budget.per != "image":
            raise BudgetError(
                f"erase spends what each image's pixels say in the layers before its last cut: of {budget}, say keep, "
                'with per="image"'
            )
        if self.layers is None:
            inputs = place(_INPUTS, layers, Budget(keep=1.0))
        else:
            inputs = [layer + 1 for layer in self.layers]
            fits = inputs[1] < layers
            self._check(fits, f"layers={self.layers!r} is out of range: the last of {layers} layers is {layers - 1}")
        everything = Budget(keep=1.0)  # the first stage says how many stay
        return [(self, budget), *((_TextGuidedCut(number, layer), everything) for number, layer in enumerate(inputs))]

    def select(self, tokens: VisualTokens) -> Selection:
        entropy = tokens.patch_entropy.float()
        levels = self.compute_levels(entropy, tokens).tolist()  # waits for the device
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
        """long `[S]`: the level of each image, 0 the most complex. entropy: float32 `[S, N]`."""
        rising = entropy.masked_fill(~tokens.mask, torch.inf).sort(1).values
        middle = to_device([[(count - 1) // 2] for count in tokens.counts], entropy.device)
        thresholds = torch.tensor([*self.entropy], dtype=torch.float32, device=entropy.device)
        return (~(rising.gather(1, middle) > thresholds)).sum(1)


@dataclass(frozen=True)
class _TextGuidedCut(Pruner):
    """Keep what the text attends to most in the layer before, of each image as many as the first stage planned for this
    cut. number: of the cut, 0 or 1. layer: at whose input it is made."""

    name: ClassVar[str] = "erase"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = TEXT_ATTENTION
    query_aware: ClassVar[bool] = True
    by_content_count: ClassVar[bool] = True

    number: int
    layer: int

    def select(self, tokens: VisualTokens) -> Selection:
        planned = [one[self.number] for one in tokens.carry["counts"]]
        counts = [min(count, number) for count, number in zip(tokens.counts, planned, strict=True)]
        if counts == tokens.counts:
            return Selection(tokens.mask, counts=counts)
        score = sum_text_attention(tokens, tokens.text.mask.float()).mean(1)
        return Selection(top_mask(score, tokens.mask, to_device(counts, score.device), max(counts)), counts=counts)
