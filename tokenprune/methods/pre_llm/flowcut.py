# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenprune.base import Pruner, Selection, Site
from tokenprune.methods.tiles import Tiles
from tokenprune.registry import register
from tokenprune.tokens import VisualTokens

_BLOCKS = 23  # of CLIP-L, up to the one that LLaVA reads
_CUTS_END = _BLOCKS - 2  # the block behind which the last cut is made


@register("flowcut", site=Site.PRE_LLM, needs=("encoder_flow",), paper="arXiv 2505.19536, NeurIPS 2025")
@dataclass(frozen=True)
class FlowCut(Pruner):
    """Cut patches step by step along the vision tower, by what flows from each to the class token (FlowCut,
    experimental).

    In each block a patch's score is the class token's attention to it, and how alike its value is to the class token's,
    each as a share of all that are left, times the size of its value; half of the score so far and half of this one go
    on. Behind every second block some of the worst go, the more the sharper the attention is, and at last as many as
    have to. Tiles, and frames of a video, choose by themselves.

    Source: Tong et al., "FlowCut: Rethinking Redundancy via Information Flow for Efficient Vision-Language Models"; the
    authors' code for scores, the blocks that cut, and how many go.

    Differs from the paper: the tower is not cut, so that it saves nothing there, and a block's scores are those of the
    tower with all patches (the authors cut inside it); in a tower of another depth than CLIP-L's the 22 looks are
    spread evenly over its blocks; in towers without a class token the score is the attention that a patch receives
    times the size of its value; of LLaVA-NeXT and Qwen2-VL the authors leave twice as many in the tower and cut once
    more by the question in the decoder, which is not here; an image in a batch has what it has alone; tiles share the
    budget in proportion to their patches, newline tokens go first; tokens keep their positions of the full prompt.
    """

    @property
    def encoder_layers(self) -> tuple[float, ...]:
        # The middle of each of 23 equal parts of the depth, up to the last cut.
        return tuple((block + 0.5) / _BLOCKS for block in range(_CUTS_END + 1))

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.among(tokens)
        left, score, goal = tiles.patch, None, tiles.only(tiles.number)
        for block, layer in enumerate(self.encoder_layers):
            attention, alike, size = tokens.encoder_flow(layer).float().nan_to_num(nan=0.0).unbind(1)
            part = _part(tiles, attention, left)
            now = (part + _part(tiles, alike, left)) * size
            score = now if score is None else (score + now) / 2
            remaining = _CUTS_END - block
            if remaining % 2 == 0:
                left = tiles.top(score, _stay(tiles, part, left, goal, remaining), left)
        # What is no patch stays where more is to be kept than there are patches.
        return Selection(tiles.top(score, tiles.number, left | ~tiles.patch), counts=tokens.keep)


def _part(tiles: Tiles, score: Tensor, left: Tensor) -> Tensor:
    """float64 `[S, N]`: each score as a share of all that are `left` (bool `[S, N]`) of its tile."""
    score = score.double().masked_fill(~left, 0)
    total = torch.zeros(tiles.number.shape, dtype=torch.double, device=score.device).scatter_add(1, tiles.of, score)
    return score / total.gather(1, tiles.of).clamp(min=torch.finfo(torch.float64).tiny)


def _stay(tiles: Tiles, part: Tensor, left: Tensor, goal: Tensor, remaining: int) -> Tensor:
    """long `[S, T + 2]`: how many of each tile stay. part: `[S, N]`, shares of attention; goal: long `[S, T + 2]`, how
    many stay at last; remaining: blocks up to the last cut."""
    if not remaining:
        return goal
    number = tiles.total(left)
    entropy = torch.zeros(number.shape, dtype=torch.double, device=part.device)
    entropy = entropy.scatter_add(1, tiles.of, -torch.special.xlogy(part, part))
    evenness = entropy / number.clamp(min=2).double().log()
    gone = ((number - goal) / remaining**0.5 * (1 - evenness.square())).round().long().clamp(min=0)
    return torch.maximum(number - gone, goal)
