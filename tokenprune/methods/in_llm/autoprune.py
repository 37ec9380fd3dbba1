# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import place, profile
from tokenprune.kernels.masses import evenly
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, CutStage, SharedBudgetCuts, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LAYERS, _HEADS = 32, 32  # of the model that the curve's numbers are for
_TOP, _MIDDLE = 0.75, 14.9  # of the curve: its height, and where it has fallen by half


@register("autoprune", site=Site.IN_LLM, needs=TEXT_ATTENTION, paper="arXiv 2509.23931, NeurIPS 2025")
@dataclass(frozen=True)
class AutoPrune(SharedBudgetCuts):
    """Let image and question together decide how early visual tokens go: early where the words attend to few of them,
    late where much of the image bears on the question.

    The mutual information between words and visual tokens, in the attention of an early layer, sets the slope of a
    logistic curve of how many stay at each depth. The curve is scaled to the budget. At each cut those stay that the
    text attends to most on average.

    keep: tokens averaged over the decoder's layers, the same for every image; how they spread over the layers is what
    differs.
    layers: decoder layers at whose input the cuts are made, in place of `cuts`; the layer before the first tells the
    mutual information.
    cuts: int >= 1, how many cuts are made, evenly spread from layer 2 of 32 on; None: one at every layer from there.
    slope: the curve's slope where the mutual information is 0. gamma: by how much each bit lowers it, down to 0.

    Source: Wang et al., "AutoPrune: Each Complexity Deserves a Pruning Policy", sections 3.2 and 3.3, and the authors'
    code for the curve's numbers.

    Differs from the paper: six cuts, each with the mean of the curve up to the next one, where it makes one after
    every layer (`cuts=None`). What the authors' code does beside it is left out: the first selection by the vision
    tower's class token, and the recycling of dropped tokens. `keep` counts what layers process (there what leaves them,
    about 17 tokens of 576 less). The mutual information is a mean over heads times 32, for models of any number of
    heads, and the curve is stretched to the model's depth. Positions are kept. Where no text is after an image, the
    slope is `slope`, and the prompt's last token rates.
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.33
    asks_device: ClassVar[bool] = True
    by_content_count: ClassVar[bool] = True

    cuts: Annotated[int, Ge(1)] | None = 6
    slope: Annotated[float, Ge(0)] = 0.4
    gamma: Annotated[float, Ge(0)] = 0.2

    @property
    def depths(self) -> Sequence[float]:
        number = len(self.layers or ()) or self.cuts or _LAYERS - 2
        return [2 / _LAYERS + one * (1 - 2 / _LAYERS) / number for one in range(number)]

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        placed = self.layers
        if placed is None:
            first = place(self.depths[:1], layers, budget)[0]
            number = min(self.cuts or layers, layers - first)
            placed = tuple(first + one * (layers - first) // number for one in range(number))
        # All cuts have the budget of one: what the first would leave is what the curve spreads over the layers.
        even = profile(layers, [(layer, 1.0) for layer in placed], budget)
        return [(_Stage(self, number, cut.layer, tuple(placed), layers), cut.budget) for number, cut in enumerate(even)]


@dataclass(frozen=True)
class _Stage(CutStage):
    """One of the cuts at the layers `placed` of `depth`."""

    method: AutoPrune
    placed: tuple[int, ...]
    depth: int

    def select(self, tokens: VisualTokens) -> Selection:
        if "counts" not in tokens.carry:
            bits = compute_mutual_information(tokens.text_attention, tokens.text.mask).mean(1) * _HEADS
            slopes = (self.method.slope - self.method.gamma * bits.nan_to_num(nan=0.0, posinf=0.0)).clamp(min=0)
            each = zip(tokens.counts, tokens.keep, slopes.tolist(), strict=True)  # waits for the device
            tokens.remember("counts", [self._counts(*one) for one in each])
        planned = [one[self.index] for one in tokens.carry["counts"]]
        counts = [min(count, number) for count, number in zip(tokens.counts, planned, strict=True)]
        if counts == tokens.counts:
            return Selection(tokens.mask, counts=counts)
        score = sum_text_attention(tokens, evenly(tokens.text.mask)).mean(1)
        return Selection(top_mask(score, tokens.mask, to_device(counts, score.device), max(counts)), counts=counts)

    def _counts(self, count: int, even: int, slope: float) -> list[int]:
        """Return how many of `count` tokens each cut keeps, where `even` at each of them is what may be spent."""
        if even >= count:
            return [count] * len(self.placed)
        ends = [*self.placed[1:], self.depth]
        spans = [end - start for start, end in zip(self.placed, ends, strict=True)]
        curve = [
            sum(compute_retention(layer * _LAYERS / self.depth - 1, slope) for layer in range(start, end))
            / (end - start)
            for start, end in zip(self.placed, ends, strict=True)
        ]
        room = even * sum(spans)

        def kept(scale: float) -> list[int]:
            return [max(1, min(count, round(count * scale * one))) for one in curve]

        low, high = 0.0, 1 / min(curve) + 1
        for _ in range(60):
            scale = (low + high) / 2
            spent = sum(span * number for span, number in zip(spans, kept(scale), strict=True))
            low, high = (low, scale) if spent > room else (scale, high)
        return kept(low)


def compute_retention(layer: float, slope: float) -> float:
    """Return the curve of the number of tokens that stay after `layer` of 32."""
    return _TOP / (1 + math.exp(min(700.0, slope * (layer - _MIDDLE - slope))))


def compute_mutual_information(attention: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """float32 `[S, H]`, in bits: of the words of a text, each as likely, and the visual tokens that they attend to.

    attention: float `[S, H, M, N]`, of which 0 tells nothing; words: bool `[S, M]`.
    """
    number = words.sum(1)[:, None, None, None]
    joint = attention.float() / number
    expected = joint.sum(2, keepdim=True) / number
    return (joint * (joint / (expected + 1e-6)).clamp(min=1e-6).log2()).sum((2, 3))
