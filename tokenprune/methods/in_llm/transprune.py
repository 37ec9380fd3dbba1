# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.kernels.masses import evenly
from tokenprune.methods.multi_cut import CutStage, SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_LOOKS = frozenset({"transitions"})


@register(
    "transprune", site=Site.IN_LLM, needs=_LOOKS | {"next_text_attention", "next_row_attention"},
    paper="arXiv 2507.20630, CVPR 2026",
)  # fmt: skip
@dataclass(frozen=True)
class TransPrune(SharedBudgetCuts):
    """Keep the visual tokens that attention and MLP turn and lengthen, layer after layer, and those that the question
    attends to (TransPrune).

    A module's transition of a token is how much longer its output is than its input, times a softmax over the image of
    how far it points elsewhere. Transitions are added up over all layers from the one before the first cut on.

    keep: tokens averaged over the decoder's layers; 0.41 (default) is the paper's "High" on LLaVA-1.5, 576, 504, 360
    and 72 of 576 tokens.
    layers: three decoder layers at whose input the cuts are made; None: 7, 9 and 12 of 32, in proportion.
    alpha: in [0, 1], the weight of transitions against that of the attention of the text after the image, in the layer
    after each cut.

    Source: Li et al., "TransPrune: Token Transition Pruning for Efficient Large Vision-Language Model", sections 3.2 to
    3.4, and the authors' code where the two differ: 1 minus the cosine, without its absolute value; the attention of
    the layer right after the cut.

    Differs from the paper: the softmax runs over the tokens of an image, as the paper says (the code's over a whole
    batch). Counts follow `keep` by one profile, 504 : 360 : 72, and positions are kept (there they are numbered anew
    after each cut). Where no text is after an image, the prompt's last token rates.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.41
    depths = (7 / 32, 9 / 32, 12 / 32)
    sizes = (7 / 8, 5 / 8, 1 / 8)

    alpha: Annotated[float, Ge(0), Le(1)] = 0.5

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        whole = super().stages(budget, layers)
        cuts = {stage.layer: (stage, part) for stage, part in whole if isinstance(stage, CutStage)}
        between = range(min(cuts), max(cuts))
        looks = [(_Look(self, 0, layer), Budget(keep=1.0, per=budget.per)) for layer in between if layer not in cuts]
        return [*sorted([*cuts.values(), *looks], key=lambda one: one[0].layer)]

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        total = accumulate_transitions(tokens)
        words = tokens.text.mask
        weights = evenly(words)
        attention = tokens.attention_from(weights, "next_text_attention").mean(1)
        attention = torch.where(words.any(1, keepdim=True), attention, tokens.next_row_attention.mean(1))
        return self.alpha * _share(total, tokens.mask) + (1 - self.alpha) * _share(attention.float(), tokens.mask)


@dataclass(frozen=True)
class _Look(CutStage):
    """Adds the transitions of the layer before to what is known, and removes nothing."""

    needs = _LOOKS
    by_content_count = True  # asked, though all tokens stay

    def select(self, tokens: VisualTokens) -> Selection:
        accumulate_transitions(tokens)
        return Selection(tokens.mask, counts=tokens.counts)


def accumulate_transitions(tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, N]`: the transitions of all layers so far, that before this stage included."""
    longer, cosine = tokens.transitions.float().unbind(-1)  # [S, N, 2]
    turned = (1 - cosine).masked_fill(~tokens.mask[:, :, None], -torch.inf).softmax(1)
    total = (turned * longer).sum(2).masked_fill(~tokens.mask, 0)
    total = total + tokens.carry["transitions"] if "transitions" in tokens.carry else total
    tokens.remember("transitions", total, per_token=True)
    return total


def _share(score: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    score = score.masked_fill(~mask, 0)
    return score / score.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
