# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.clusters import by_rows
from tokenprune.kernels.coverage import alike, cosines, cover
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
    """Keep the visual tokens that cover best what the question's most telling words point at (EADP).

    A text token tells much if its similarity to the image is concentrated in few places: those of the lowest entropy,
    and the mean of the text, make a map of relevance, which is smoothed over the grid. The next pick adds most to how
    well all tokens are covered, each counted by its relevance.

    alpha: weight of the mean of the text in the map, beside the telling words.
    beta: power of the map; 2 as the authors have it in the language model's space, 1 in CLIP's.
    share: of the text tokens, how many are telling ones; at least one is.
    sign: -1 takes what is unlike the text as relevant, as in all of the authors' code, 1 what is alike.
    smooth: False leaves out the smoothing. A token that is no cell of a grid is never smoothed.

    Source: "Combating Textual Noise and Redundancy: Entropy-Aware Dense Visual Token Pruning", and the authors' code
    for Qwen2.5-VL and Qwen3-VL, by description.

    Differs from the paper: it is the form that the authors' code has for Qwen-VL, in the language model's space, on
    every model, because the one for LLaVA needs CLIP's text tower. The paper speaks of half of the text tokens and of a
    power near 10; the defaults are the code's. The text is what stands behind the image. The tiles of an image are one
    set, with exactly its budget; without text all tokens count alike; tokens keep their positions.
    """

    query_aware: ClassVar[bool] = True

    alpha: Annotated[float, Ge(0), Le(1)] = 0.5
    beta: Annotated[float, Ge(0)] = 2.0
    share: Annotated[float, Gt(0), Le(1)] = 0.2
    sign: Literal[-1, 1] = -1
    smooth: bool = True

    def select(self, tokens: VisualTokens) -> Selection:
        mask, most = tokens.mask, max(tokens.keep)
        weight = rescale(self._relevance(tokens), mask, above=_TINY)
        if self.smooth:
            weight = smooth_on_grid(weight, tokens)

        def of(x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            covered = Relation(alike(x, mask), lambda one, weight: (one + 1) / 2 * weight, weight.masked_fill(~mask, 0))
            return cover([covered], mask, number, most)

        given = (tokens.hidden, mask, tokens.budget, weight**self.beta)
        return Selection(by_rows(of, 2 * mask.shape[1] ** 2, *given), counts=tokens.keep)

    def _relevance(self, tokens: VisualTokens) -> torch.Tensor:
        """float32 `[S, N]`: how the text after each image points at its tokens; all alike without text."""
        mask, text = tokens.mask, tokens.text
        if not text.mask.shape[1]:
            return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        pointed = self.sign * cosines(tokens.hidden, text.hidden, mask)
        there = (_SHARPNESS * pointed).masked_fill(~mask.unsqueeze(2), -torch.inf).softmax(1)
        entropy = -(there * (there + 1e-12).log()).sum(1)
        telling = select_low_entropy_words(entropy, text, self.share)
        weight = (-entropy / _TEMPERATURE).masked_fill(~telling, -torch.inf).softmax(1).nan_to_num(nan=0.0)
        words = text.hidden.float().masked_fill(~text.mask.unsqueeze(2), 0).sum(1, keepdim=True)
        whole = self.sign * cosines(tokens.hidden, words, mask).squeeze(2)  # a sum points where the mean does
        return self.alpha * whole + (1 - self.alpha) * (pointed @ weight.unsqueeze(2)).squeeze(2)


def select_low_entropy_words(entropy: torch.Tensor, text: TextTokens, share: float) -> torch.Tensor:
    """bool `[S, M]`: the text tokens of the lowest entropy (float `[S, M]`), a share of them, rounded down, at least 1;
    of equal ones the first."""
    number = (text.mask.sum(1).double() * share).long().clamp(min=1)
    return top_mask(-entropy, text.mask, torch.minimum(number, text.mask.sum(1)), text.mask.shape[1])


def smooth_on_grid(score: torch.Tensor, tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, N]`: `score` under a Gaussian of 3 x 3 cells (sigma 1), mirrored at the edges, on the grid of each
    image, frame by frame; as it is where no grid is known, or one is a single row or column."""
    near = math.exp(-0.5)
    near, own = near / (1 + 2 * near), 1 / (1 + 2 * near)
    score = score.clone()
    for row, (grid, count) in enumerate(zip(tokens.grids, tokens.counts, strict=True)):
        if grid is not None and math.prod(grid) == count and min(grid[1:]) > 1:
            cells = score[row, :count].view(grid[0], 1, *grid[1:])
            cells = torch.nn.functional.pad(cells, (1, 1, 1, 1), mode="reflect")
            cells = near * (cells[..., :-2, :] + cells[..., 2:, :]) + own * cells[..., 1:-1, :]
            cells = near * (cells[..., :-2] + cells[..., 2:]) + own * cells[..., 1:-1]
            score[row, :count] = cells.flatten()
    return score
