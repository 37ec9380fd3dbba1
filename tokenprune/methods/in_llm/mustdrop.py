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
from tokenprune.budgets.schedule import choose_layers, plan_cuts
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import CutStage, SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_HALVINGS = 40  # bisection steps of the search for a ratio
_DEFAULT_RATIO = 0.5  # ratio between cuts if the budget is a token count, which is not a share until the image is known


@register("mustdrop", site=Site.IN_LLM, paper="arXiv 2411.10803")
@dataclass(frozen=True)
class MustDrop(SharedBudgetCuts):
    """Drop tokens with little attention from the text in four cuts (MustDrop).

    A token is ranked by the larger of two scores: its share of the text's attention to the image, and the highest
    attention from any word. Tokens with the most attention in the vision tower are protected: each cut keeps them
    first. Images without following text are scored by the prompt's last token.

    `keep` is the average number of tokens over the decoder's layers. The default 1/3 matches the paper's "192 tokens"
    of 576. With `thresholds` it is an upper bound.

    Args:
        layers: Decoder layers of the four cuts. None: layers 3, 7, 11 and 15 of 32, scaled to the depth of the decoder.
            Decoders with four layers or fewer use the first of these.
        protected: Share of an image's tokens that are protected. 0 does not read the vision tower.
        thresholds: The authors' rule (share, word): drop a token if its share of the text's attention is below `share`
            and no word attends to it with at least `word`. None: rank the tokens and keep exactly the budget.

    Source:
        "Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model" (arXiv 2411.10803),
        stages 2 and 3 of the authors' code. The paper's text was not available. "After layers 2, 6, 10 and 14" in the
        code is the input of layers 3, 7, 11 and 15 here.

    Differences from the paper:
        - Counts follow `keep` and shrink by a constant ratio from cut to cut. The code uses one set of thresholds per
          benchmark.
        - The tower attention comes from the last block that the model reads. The code uses the block after it. Towers
          without a class token use the attention of all patches.
        - Kept tokens keep their positions. The authors renumber them.
        - Stage 1, which merges windows of patches in the tower, is left out. Combine with `tome` and `protected=0`.
        - Stage 4, which also drops tokens from the caches of earlier layers, is left out.

    Examples:
        >>> model = tokenprune.patch(model, MustDrop(protected=0.1), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        4
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 1 / 3
    fallback_options: ClassVar[Mapping[str, Any]] = {"protected": 0.0}
    depths = (3 / 32, 7 / 32, 11 / 32, 15 / 32)

    protected: Annotated[float, Ge(0), Le(1)] = 0.08
    thresholds: Sequence[Annotated[float, Ge(0)]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        is_pair = self.thresholds is None or len(self.thresholds) == 2
        self._check(is_pair, f"thresholds={self.thresholds!r} must be a pair of numbers, (share, word)")

    @property
    def chooses_count(self) -> bool:
        return self.thresholds is not None

    @property
    def needs(self) -> frozenset[str]:
        tower = {"encoder_attention"} if self.protected else set()
        return frozenset({"text_sum_and_max", "last_row_attention", *tower})

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        cut_layers = list(self.layers or choose_layers(self.depths[: layers - 1], layers, budget))
        ratio = _DEFAULT_RATIO if budget.share is None else _find_ratio(cut_layers, layers, budget.share)
        cuts = plan_cuts(layers, [(layer, ratio**index) for index, layer in enumerate(cut_layers)], budget)
        return [(CutStage(self, index, cut.layer), cut.budget) for index, cut in enumerate(cuts)]

    def select(self, tokens: VisualTokens) -> Selection:
        share, word = self._compute_scores(tokens)
        limits = self.thresholds or (1.0, 1.0)
        tiny = torch.finfo(torch.float32).tiny
        rank = torch.maximum(share / max(limits[0], tiny), word / max(limits[1], tiny))
        protected_mask, max_kept = self._get_protected(tokens), max(tokens.keep)
        first = top_mask(rank, protected_mask, tokens.budget, max_kept)
        candidates = tokens.mask & ~protected_mask
        if self.thresholds is not None:
            candidates = candidates & ((share >= limits[0]) | (word >= limits[1]))
            kept = first | top_mask(rank, candidates, tokens.budget - first.sum(1), max_kept)
            # Keep at least one token.
            best = top_mask(rank, tokens.mask, torch.ones_like(tokens.budget), 1)
            return Selection(torch.where(kept.any(1, keepdim=True), kept, best))
        return Selection(first | top_mask(rank, candidates, tokens.budget - first.sum(1), max_kept), counts=tokens.keep)

    def _compute_scores(self, tokens: VisualTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the share of the attention of the text, and the highest attention from a word, per token."""
        total, highest = tokens.text_sum_and_max.unbind(1)
        no_text = ~tokens.text.mask.any(1, keepdim=True)
        last = tokens.last_row_attention.mean(1).masked_fill(~tokens.mask, 0)
        total, highest = torch.where(no_text, last, total), torch.where(no_text, last, highest)
        tiny = torch.finfo(torch.float32).tiny
        return total / total.masked_fill(~tokens.mask, 0).sum(1, keepdim=True).clamp(min=tiny), highest

    def _get_protected(self, tokens: VisualTokens) -> torch.Tensor:
        """Return the protected tokens, shape (segments, tokens), bool. Computed at the first cut."""
        if not self.protected:
            return torch.zeros_like(tokens.mask)
        if "protected" not in tokens.carry:
            num_protected = [math.ceil(self.protected * count) for count in tokens.counts]
            score = tokens.encoder_attention(-1).mean(1)
            protected = top_mask(score, tokens.mask, to_device(num_protected, score.device), max(num_protected))
            tokens.remember("protected", protected, per_token=True)
        return tokens.carry["protected"]


def _find_ratio(cut_layers: Sequence[int], layers: int, share: float) -> float:
    """Return the ratio between successive counts that makes the average over the layers equal `share`."""
    runs = [later - layer for layer, later in pairwise([*cut_layers, layers])]
    low, high = 2.0**-10, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        spent = cut_layers[0] + sum(run * middle ** (1 + index) for index, run in enumerate(runs))
        low, high = (middle, high) if spent < share * layers else (low, middle)
    return high
