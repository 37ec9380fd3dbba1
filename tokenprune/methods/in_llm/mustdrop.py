# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import place, profile
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import CutStage, SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_HALVES = 40  # of the search for a ratio
_STEP = 0.5  # from cut to cut, for a number of tokens, which is no share before an image is seen


@register("mustdrop", site=Site.IN_LLM, paper="arXiv 2411.10803")
@dataclass(frozen=True)
class MustDrop(SharedBudgetCuts):
    """Drop in four cuts the visual tokens that the text neither attends to on the whole nor with any of its words; what
    the vision tower finds most salient is dropped last.

    keep: tokens averaged over the decoder's layers; a third (default) is the paper's "192 tokens" of 576.
    layers: four decoder layers at whose input the cuts are made; None: 3, 7, 11 and 15 of 32, in proportion, and
    in a decoder of four layers or fewer the first of these.
    protected: share of an image's tokens with most attention in the vision tower, which go first into what a cut keeps;
    0 asks the tower nothing.
    thresholds: (share, word) of the authors' rule: a token leaves where it has less than `share` of the attention that
    the text pays to the image, and no word pays it as much as `word`. What stays is then the content's affair, and
    `keep` an upper bound. None: both thresholds are one number, which follows from `keep`.

    Source: "Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model", the authors' code,
    its stages 2 and 3. "After layers 2, 6, 10 and 14" there is at the input of 3, 7, 11 and 15 here.

    Differs from the paper: counts follow `keep`, falling from cut to cut by one ratio (the code has thresholds alone,
    set for each benchmark); the tower's block is the last that the model reads (there the one after it), and without
    a class token the attention of all patches counts; kept tokens keep their positions (there they are numbered anew).
    Where no text is after an image, the prompt's last token rates. Left out: stage 1, merging windows of patches in
    the tower (compose it with `tome`, and `protected=0`), and stage 4, taking from the caches of earlier layers
    what later cuts drop. The paper's text was not read.
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 1 / 3
    fallback_options: ClassVar[Mapping[str, Any]] = {"protected": 0.0}
    depths = (3 / 32, 7 / 32, 11 / 32, 15 / 32)

    protected: Annotated[float, Ge(0), Le(1)] = 0.08
    thresholds: Sequence[Annotated[float, Ge(0)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        two = self.thresholds is None or len(self.thresholds) == 2
        self._check(two, f"thresholds={self.thresholds!r} must be two numbers, (share, word)")

    @property
    def by_content_count(self) -> bool:
        return self.thresholds is not None

    @property
    def needs(self) -> frozenset[str]:
        tower = {"encoder_attention"} if self.protected else set()
        return frozenset({"text_sum_and_max", "last_row_attention", *tower})

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        placed = list(self.layers or place(self.depths[: layers - 1], layers, budget))
        step = _STEP if budget.share is None else _step(placed, layers, budget.share)
        cuts = profile(layers, [(layer, step**number) for number, layer in enumerate(placed)], budget)
        return [(CutStage(self, number, cut.layer), cut.budget) for number, cut in enumerate(cuts)]

    def select(self, tokens: VisualTokens) -> Selection:
        share, word = self._paid(tokens)
        least = self.thresholds or (1.0, 1.0)
        tiny = torch.finfo(torch.float32).tiny
        rank = torch.maximum(share / max(least[0], tiny), word / max(least[1], tiny))
        key, most = self._key(tokens), max(tokens.keep)
        first = top_mask(rank, key, tokens.budget, most)
        left = tokens.mask & ~key
        if self.thresholds is not None:
            left = left & ((share >= least[0]) | (word >= least[1]))
            stays = first | top_mask(rank, left, tokens.budget - first.sum(1), most)
            # One token at least, where nothing passes and nothing is protected.
            best = top_mask(rank, tokens.mask, torch.ones_like(tokens.budget), 1)
            return Selection(torch.where(stays.any(1, keepdim=True), stays, best))
        return Selection(first | top_mask(rank, left, tokens.budget - first.sum(1), most), counts=tokens.keep)

    def _paid(self, tokens: VisualTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 `[S, N]` each: the share of the text's attention to an image that each token has, and the most that
        any word pays it."""
        total, most = tokens.text_sum_and_max.unbind(1)
        alone = ~tokens.text.mask.any(1, keepdim=True)
        last = tokens.last_row_attention.mean(1).masked_fill(~tokens.mask, 0)
        total, most = torch.where(alone, last, total), torch.where(alone, last, most)
        tiny = torch.finfo(torch.float32).tiny
        return total / total.masked_fill(~tokens.mask, 0).sum(1, keepdim=True).clamp(min=tiny), most

    def _key(self, tokens: VisualTokens) -> torch.Tensor:
        """bool `[S, N]`: the tokens that are protected, found at the first cut."""
        if not self.protected:
            return torch.zeros_like(tokens.mask)
        if "key" not in tokens.carry:
            numbers = [math.ceil(self.protected * count) for count in tokens.counts]
            score = tokens.encoder_attention(-1).mean(1)
            key = top_mask(score, tokens.mask, to_device(numbers, score.device), max(numbers))
            tokens.remember("key", key, per_token=True)
        return tokens.carry["key"]


def _step(placed: Sequence[int], layers: int, share: float) -> float:
    """Return the ratio by which counts fall from cut to cut, so that they are `share` of all on average."""
    runs = [later - layer for layer, later in pairwise([*placed, layers])]
    low, high = 2.0**-10, 1.0
    for _ in range(_HALVES):
        middle = (low + high) / 2
        spent = placed[0] + sum(run * middle ** (1 + number) for number, run in enumerate(runs))
        low, high = (middle, high) if spent < share * layers else (low, middle)
    return high
