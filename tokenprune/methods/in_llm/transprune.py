# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.kernels.masses import uniform_weights
from tokenprune.methods.multi_cut import CutStage, SharedBudgetCuts
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_TRANSITIONS = frozenset({"transitions"})


@register(
    "transprune", site=Site.IN_LLM, needs=_TRANSITIONS | {"next_text_attention", "next_row_attention"},
    paper="arXiv 2507.20630, CVPR 2026",
)  # fmt: skip
@dataclass(frozen=True)
class TransPrune(SharedBudgetCuts):
    """Keep tokens that change most between layers or that the question attends to (TransPrune).

    The transition of a token through a module (attention or MLP) is the relative growth of its norm, times a softmax
    over the image of its change of direction. Transitions are summed over all layers from the layer before the first
    cut. At each cut the score combines this sum with the attention from the text after the image in the next layer.
    Images without following text use the prompt's last token.

    `keep` is the average number of tokens over the decoder's layers. The default 0.41 is the paper's "High" setting on
    LLaVA-1.5: 576, 504, 360 and 72 of 576 tokens.

    Args:
        layers: Decoder layers of the three cuts. None: layers 7, 9 and 12 of 32, scaled to the depth of the decoder.
        alpha: Weight of the transitions against the attention, in [0, 1].

    Source:
        Li et al., "TransPrune: Token Transition Pruning for Efficient Large Vision-Language Model" (arXiv 2507.20630),
        sections 3.2 to 3.4. The authors' code decides where the two differ: 1 minus the cosine, without its absolute
        value; attention of the layer after the cut.

    Differences from the paper:
        - Counts follow `keep` in the fixed ratio 504 : 360 : 72.
        - The softmax covers the tokens of one image, as in the paper's text. The code covers a whole batch.
        - Kept tokens keep their positions. The authors renumber them after each cut.

    Examples:
        >>> model = tokenprune.patch(model, TransPrune(layers=(1, 2, 4)), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        3
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.41
    depths = (7 / 32, 9 / 32, 12 / 32)
    sizes = (7 / 8, 5 / 8, 1 / 8)

    alpha: Annotated[float, Ge(0), Le(1)] = 0.5

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        all_stages = super().stages(budget, layers)
        cuts = {stage.layer: (stage, part) for stage, part in all_stages if isinstance(stage, CutStage)}
        layers_between = range(min(cuts), max(cuts))
        transition_stages = [
            (_TransitionStage(self, 0, layer), Budget(keep=1.0, per=budget.per))
            for layer in layers_between
            if layer not in cuts
        ]
        return [*sorted([*cuts.values(), *transition_stages], key=lambda entry: entry[0].layer)]

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        total = accumulate_transitions(tokens)
        words = tokens.text.mask
        weights = uniform_weights(words)
        attention = tokens.attention_from(weights, "next_text_attention").mean(1)
        attention = torch.where(words.any(1, keepdim=True), attention, tokens.next_row_attention.mean(1))
        total, attention = _normalize(total, tokens.mask), _normalize(attention.float(), tokens.mask)
        return self.alpha * total + (1 - self.alpha) * attention


@dataclass(frozen=True)
class _TransitionStage(CutStage):
    """Stage that adds the transitions of the previous layer and keeps all tokens."""

    needs = _TRANSITIONS
    chooses_count = True  # makes the engine call select() although the budget keeps all tokens

    def select(self, tokens: VisualTokens) -> Selection:
        accumulate_transitions(tokens)
        return Selection(tokens.mask, counts=tokens.counts)


def accumulate_transitions(tokens: VisualTokens) -> torch.Tensor:
    """Add the transitions of the previous layer. Return the sum over all layers, (segments, tokens), float32."""
    growth, cosine = tokens.transitions.float().unbind(-1)  # [S, N, 2]
    turn_weight = (1 - cosine).masked_fill(~tokens.mask[:, :, None], -torch.inf).softmax(1)
    total = (turn_weight * growth).sum(2).masked_fill(~tokens.mask, 0)
    total = total + tokens.carry["transitions"] if "transitions" in tokens.carry else total
    tokens.remember("transitions", total, per_token=True)
    return total


def _normalize(score: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    score = score.masked_fill(~mask, 0)
    return score / score.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
