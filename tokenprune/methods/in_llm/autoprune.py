# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import choose_layers, plan_cuts
from tokenprune.kernels.masses import uniform_weights
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, CutStage, SharedBudgetCuts, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LAYERS, _HEADS = 32, 32  # layers and heads of the model that the paper's constants belong to
_TOP, _MIDDLE = 0.75, 14.9  # height of the curve, and the layer at half of this height


@register("autoprune", site=Site.IN_LLM, needs=TEXT_ATTENTION, paper="arXiv 2509.23931, NeurIPS 2025")
@dataclass(frozen=True)
class AutoPrune(SharedBudgetCuts):
    """Drop tokens along a curve that adapts to image and question (AutoPrune).

    The attention of an early layer gives the mutual information between words and visual tokens. It sets the slope of a
    logistic curve of the number of tokens per layer: tokens leave early if the words attend to few of them, and late if
    much of the image matters to the question. The curve is scaled to the budget. Each cut keeps the tokens with the
    highest mean attention from the text after the image. Images without following text use `slope` and the prompt's
    last token.

    `keep` is the average number of tokens over the decoder's layers and is the same for every image. Only its
    distribution over the layers depends on the content.

    Args:
        layers: Decoder layers of the cuts; overrides `cuts`. The layer before the first cut provides the mutual
            information.
        cuts: Number of cuts, evenly spaced from layer 2 of 32 on. None: one cut at every layer from there.
        slope: Slope of the curve at zero mutual information.
        gamma: Decrease of the slope per bit of mutual information. The slope does not fall below 0.

    Source:
        Wang et al., "AutoPrune: Each Complexity Deserves a Pruning Policy" (arXiv 2509.23931), sections 3.2 and 3.3,
        and the authors' code for the constants of the curve.

    Differences from the paper:
        - Six cuts by default, each with the mean of the curve until the next cut. The paper cuts after every layer
          (`cuts=None`).
        - The first selection by the vision tower's class token and the recycling of dropped tokens are left out.
        - `keep` counts the tokens that layers process. The paper counts the tokens that leave them, about 17 of 576
          less.
        - The mutual information is the mean over heads times 32, for models with any number of heads.
        - The curve is stretched to the depth of the model.
        - Kept tokens keep their positions.

    Examples:
        >>> model = tokenprune.patch(model, AutoPrune(cuts=3), keep=0.5)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_in
        256
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.33
    syncs_device: ClassVar[bool] = True
    chooses_count: ClassVar[bool] = True

    cuts: Annotated[int, Ge(1)] | None = 6
    slope: Annotated[float, Ge(0)] = 0.4
    gamma: Annotated[float, Ge(0)] = 0.2

    @property
    def depths(self) -> Sequence[float]:
        num_cuts = len(self.layers or ()) or self.cuts or _LAYERS - 2
        return [2 / _LAYERS + cut * (1 - 2 / _LAYERS) / num_cuts for cut in range(num_cuts)]

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        cut_layers = self.layers
        if cut_layers is None:
            first = choose_layers(self.depths[:1], layers, budget)[0]
            num_cuts = min(self.cuts or layers, layers - first)
            cut_layers = tuple(first + cut_index * (layers - first) // num_cuts for cut_index in range(num_cuts))
        # Every cut gets the budget of a single cut at the first layer. The curve redistributes it over the layers.
        cuts = plan_cuts(layers, [(layer, 1.0) for layer in cut_layers], budget)
        return [
            (_Stage(self, index, cut.layer, tuple(cut_layers), layers), cut.budget) for index, cut in enumerate(cuts)
        ]


@dataclass(frozen=True)
class _Stage(CutStage):
    """One cut of AutoPrune. `cut_layers` holds the layers of all cuts, `depth` the number of decoder layers."""

    method: AutoPrune
    cut_layers: tuple[int, ...]
    depth: int

    def select(self, tokens: VisualTokens) -> Selection:
        if "counts" not in tokens.carry:
            bits = compute_mutual_information(tokens.text_attention, tokens.text.mask).mean(1) * _HEADS
            slopes = (self.method.slope - self.method.gamma * bits.nan_to_num(nan=0.0, posinf=0.0)).clamp(min=0)
            images = zip(tokens.counts, tokens.keep, slopes.tolist(), strict=True)  # device sync
            tokens.remember("counts", [self._plan_counts(*image) for image in images])
        planned = [counts_per_cut[self.index] for counts_per_cut in tokens.carry["counts"]]
        counts = [min(count, planned_count) for count, planned_count in zip(tokens.counts, planned, strict=True)]
        if counts == tokens.counts:
            return Selection(tokens.mask, counts=counts)
        score = sum_text_attention(tokens, uniform_weights(tokens.text.mask)).mean(1)
        return Selection(top_mask(score, tokens.mask, to_device(counts, score.device), max(counts)), counts=counts)

    def _plan_counts(self, count: int, even_count: int, slope: float) -> list[int]:
        """Return the number of tokens that each cut keeps.

        Args:
            count: Tokens of the image.
            even_count: Tokens per cut if all cuts kept the same number. Defines the total budget.
            slope: Slope of the retention curve.
        """
        if even_count >= count:
            return [count] * len(self.cut_layers)
        ends = [*self.cut_layers[1:], self.depth]
        spans = [end - start for start, end in zip(self.cut_layers, ends, strict=True)]
        curve = [
            sum(compute_retention(layer * _LAYERS / self.depth - 1, slope) for layer in range(start, end))
            / (end - start)
            for start, end in zip(self.cut_layers, ends, strict=True)
        ]
        budget = even_count * sum(spans)

        def compute_counts(scale: float) -> list[int]:
            return [max(1, min(count, round(count * scale * share))) for share in curve]

        low, high = 0.0, 1 / min(curve) + 1
        for _ in range(60):
            scale = (low + high) / 2
            spent = sum(span * num_kept for span, num_kept in zip(spans, compute_counts(scale), strict=True))
            low, high = (low, scale) if spent > budget else (scale, high)
        return compute_counts(low)


def compute_retention(layer: float, slope: float) -> float:
    """Return the share of visual tokens kept after `layer` of 32, by the logistic curve."""
    return _TOP / (1 + math.exp(min(700.0, slope * (layer - _MIDDLE - slope))))


def compute_mutual_information(attention: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the mutual information of text and visual tokens in bits, shape (segments, heads), float32.

    The words of a text count as equally likely.

    Args:
        attention: Attention from text to visual tokens, shape (segments, heads, words, tokens). Zero entries contribute
            0.
        words: Mask of text tokens, shape (segments, words), bool.
    """
    num_words = words.sum(1)[:, None, None, None]
    joint = attention.float() / num_words
    expected = joint.sum(2, keepdim=True) / num_words
    return (joint * (joint / (expected + 1e-6)).clamp(min=1e-6).log2()).sum((2, 3))
