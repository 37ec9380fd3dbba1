# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.clusters import map_rows
from tokenprune.kernels.coverage import cosine_products, cosines, greedy_cover
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.take import top_mask
from tokenprune.methods.registry import register
from tokenprune.methods.scores import rescale
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import TextTokens, VisualTokens

_SHARPNESS = 100.0
_TEMPERATURE = 0.01 + 1e-6
_TINY = 1e-6


@register("eadp", site=Site.PRE_LLM, paper="EADP, ECCV 2026")
@dataclass(frozen=True)
class EADP(Pruner):
    """Keep tokens that cover the regions of the question's key words.

    A text token is specific if its similarity to the image is concentrated on few visual tokens, so its entropy is low.
    The specific text tokens and the mean of the text give a relevance map, which is smoothed over the grid. Each pick
    adds most to the coverage of all tokens, weighted by their relevance.

    Args:
        alpha: Weight in [0, 1] of the mean of the text in the relevance map.
        beta: Power of the map. The authors use 2 in the language model's space and 1 in CLIP's.
        share: Share of the text tokens that count as specific; at least one token does.
        sign: -1 treats tokens dissimilar to the text as relevant, as all of the authors' code does; 1 similar tokens.
        smooth: Smooth the map. Tokens outside of a grid are never smoothed.

    Source:
        "Combating Textual Noise and Redundancy: Entropy-Aware Dense Visual Token Pruning" (EADP, ECCV 2026), from a
        description of the authors' code for Qwen2.5-VL and Qwen3-VL.

    Differences from the paper:
        - Every model uses the authors' form for Qwen-VL, in the language model's space. Their form for LLaVA needs
          CLIP's text tower.
        - The paper uses half of the text tokens and a power near 10. The defaults are from the code.
        - The text is everything after the image. Without text, all tokens are equally relevant.
        - The tiles of an image form one set with an exact budget.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, EADP(sign=1), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    query_aware: ClassVar[bool] = True

    alpha: Annotated[float, Ge(0), Le(1)] = 0.5
    beta: Annotated[float, Ge(0)] = 2.0
    share: Annotated[float, Gt(0), Le(1)] = 0.2
    sign: Literal[-1, 1] = -1
    smooth: bool = True

    def select(self, tokens: VisualTokens) -> Selection:
        mask, max_tokens = tokens.mask, max(tokens.keep)
        weight = rescale(self._relevance(tokens), mask, above=_TINY)
        if self.smooth:
            weight = smooth_on_grid(weight, tokens)

        def pick_rows(
            x: torch.Tensor, mask: torch.Tensor, num_kept: torch.Tensor, weight: torch.Tensor
        ) -> torch.Tensor:
            covered = Relation(
                cosine_products(x, mask),
                lambda similarity, weight: (similarity + 1) / 2 * weight,
                weight.masked_fill(~mask, 0),
            )
            return greedy_cover([covered], mask, num_kept, max_tokens)

        inputs = (tokens.hidden, mask, tokens.budget, weight**self.beta)
        return Selection(map_rows(pick_rows, 2 * mask.shape[1] ** 2, *inputs), counts=tokens.keep)

    def _relevance(self, tokens: VisualTokens) -> torch.Tensor:
        """Return the relevance of each token to the text after its image, float32 (S, N). Zeros without text."""
        mask, text = tokens.mask, tokens.text
        if not text.mask.shape[1]:
            return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        similarity = self.sign * cosines(tokens.hidden, text.hidden, mask)
        share = (_SHARPNESS * similarity).masked_fill(~mask.unsqueeze(2), -torch.inf).softmax(1)
        entropy = -(share * (share + 1e-12).log()).sum(1)
        is_selected = select_low_entropy_words(entropy, text, self.share)
        weight = (-entropy / _TEMPERATURE).masked_fill(~is_selected, -torch.inf).softmax(1).nan_to_num(nan=0.0)
        # The sum has the same direction as the mean.
        sentence = text.hidden.float().masked_fill(~text.mask.unsqueeze(2), 0).sum(1, keepdim=True)
        of_sentence = self.sign * cosines(tokens.hidden, sentence, mask).squeeze(2)
        of_words = (similarity @ weight.unsqueeze(2)).squeeze(2)
        return self.alpha * of_sentence + (1 - self.alpha) * of_words


def select_low_entropy_words(entropy: torch.Tensor, text: TextTokens, share: float) -> torch.Tensor:
    """Select the text tokens of lowest entropy, bool (S, M): a share of them, rounded down, at least one.

    Args:
        entropy: Entropy of each text token's similarity to the image, float (S, M).
        text: Text tokens after each image.
        share: Share of the text tokens to select.
    """
    num_words = (text.mask.sum(1).double() * share).long().clamp(min=1)
    return top_mask(-entropy, text.mask, torch.minimum(num_words, text.mask.sum(1)), text.mask.shape[1])


def smooth_on_grid(score: torch.Tensor, tokens: VisualTokens) -> torch.Tensor:
    """Smooth `score` (S, N) with a 3 x 3 Gaussian (sigma 1, reflected edges) in each frame, float32 (S, N).

    Images without a known grid, or with a single row or column, are unchanged.
    """
    neighbor = math.exp(-0.5)
    neighbor, center = neighbor / (1 + 2 * neighbor), 1 / (1 + 2 * neighbor)
    score = score.clone()
    for row, (grid, count) in enumerate(zip(tokens.grids, tokens.counts, strict=True)):
        if grid is not None and math.prod(grid) == count and min(grid[1:]) > 1:
            cells = score[row, :count].view(grid[0], 1, *grid[1:])
            cells = torch.nn.functional.pad(cells, (1, 1, 1, 1), mode="reflect")
            cells = neighbor * (cells[..., :-2, :] + cells[..., 2:, :]) + center * cells[..., 1:-1, :]
            cells = neighbor * (cells[..., :-2] + cells[..., 2:]) + center * cells[..., 1:-1]
            score[row, :count] = cells.flatten()
    return score
