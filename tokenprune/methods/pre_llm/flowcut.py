# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from tokenprune.budgets import Budget
from tokenprune.kernels.merging import Merge
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.sites.encoder import EncoderMethod, Matcher, Tower
from tokenprune.selection.tokens import VisualTokens

_BLOCKS = 23  # of CLIP-L, up to the one that LLaVA reads
_CUTS_END = _BLOCKS - 2  # the block after which the last cut is made


@register("flowcut", site=Site.PRE_LLM, needs=("encoder_flow",), paper="arXiv 2505.19536, NeurIPS 2025")
@dataclass(frozen=True)
class FlowCut(Pruner):
    """Cut patches step by step along the vision tower, by what flows from each to the class token (FlowCut,
    experimental).

    In each block a patch's score is the class token's attention to it, and how alike its value is to the class token's,
    each as a share of all that are left, times the size of its value; half of the score so far and half of this one go
    on. After every second block some of the worst go, the more the sharper the attention is, and at last as many as
    have to. Tiles, and frames of a video, choose by themselves.

    inside: cut inside the tower, as the authors do: later blocks compute, and compare, the patches that are left alone.
    On CLIP and SigLIP towers whose images are one tile, of which each patch becomes a visual token; `keep` is then a
    share or a number of the patches. None: inside where that can be, and after the tower elsewhere. True refuses what
    cannot be cut so; False always chooses after the tower.

    Source: Tong et al., "FlowCut: Rethinking Redundancy via Information Flow for Efficient Vision-Language Models"; the
    authors' code for scores, the blocks that cut, and how many go.

    Differs from the paper: after the tower (`inside=False`) is not the authors' algorithm: the tower is not cut, so
    that it saves nothing there, and a block's scores are those of the tower with all patches; in a tower of another
    depth than CLIP-L's the 22 looks are spread evenly over its blocks; in towers without a class token the score is the
    attention that a patch receives times the size of its value; of LLaVA-NeXT and Qwen2-VL the authors leave twice as
    many in the tower and cut once more by the question in the decoder, which is not here; an image in a batch has what
    it has alone; tiles share the budget in proportion to their patches, newline tokens go first; tokens keep their
    positions of the full prompt.
    """

    asks_device: ClassVar[bool] = True

    inside: bool | None = None

    @property
    def preferred(self) -> Method:
        return replace(self, inside=True) if self.inside is None else self

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        return [(_InTower() if self.inside else self, budget)]

    @property
    def encoder_layers(self) -> tuple[float, ...]:
        # The middle of each of 23 equal parts of the depth, up to the last cut.
        return tuple((block + 0.5) / _BLOCKS for block in range(_CUTS_END + 1))

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        left, goal = tiles.is_patch, tiles.zero_non_patches(tiles.num_kept)
        score: torch.Tensor | None = None
        for block, layer in enumerate(self.encoder_layers):
            left, score = _update_scores(tiles, tokens.encoder_flow(layer), left, score, goal, _CUTS_END - block)
        assert score is not None  # the tower has blocks
        # What is no patch stays where more is to be kept than there are patches.
        return Selection(tiles.top(score, tiles.num_kept, left | ~tiles.is_patch), counts=tokens.keep)


@dataclass(frozen=True)
class _InTower(EncoderMethod):
    """Drops inside the tower, between attention and MLP of a block: the same for those that stay as after its MLP."""

    inexact: ClassVar[None] = None
    name: ClassVar[str] = "flowcut"
    proportional = False
    ragged = True
    reads = "encoder_flow"

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return what drops patches in each block that is looked at."""
        cuts = _TowerCuts(tower.protected, tower.left(budget))
        looks: list[list[int]] = [[] for _ in range(tower.blocks)]
        for block in range(_CUTS_END + 1):
            looks[math.ceil((block + 0.5) / _BLOCKS * tower.read) - 1].append(_CUTS_END - block)
        return [partial(cuts.look, remaining=tuple(one)) if one else None for one in looks]


@dataclass
class _TowerCuts:
    """One forward of a tower with `protected` class tokens, of whose patches `keep` are to be left of each image.

    score: `[B, n]` so far, of the patches that are left of B images, n of the one that has most.
    """

    protected: int
    keep: int
    score: torch.Tensor | None = None

    def look(self, flow: torch.Tensor, counts: list[int] | None, remaining: tuple[int, ...]) -> Merge | None:
        """Return what drops patches after a block. flow: `[B, 3, n]`; counts: tokens of each image, None = all alike;
        remaining: see `_stay`, for each time that the block is looked at."""
        rows, _, width = flow.shape
        counts = [width] * rows if counts is None else [count - self.protected for count in counts]
        number = to_device(counts, flow.device)[:, None]
        left = torch.arange(width, device=flow.device) < number
        # One tile an image; what is padding is in none.
        keep = torch.tensor([[self.keep, 0, 0]], device=flow.device).expand(rows, -1)
        of = torch.where(left, 0, 2)
        tiles = Tiles(of, keep, torch.zeros_like(keep).scatter_add(1, of, torch.ones_like(of)))
        for one in remaining:
            left, self.score = _update_scores(tiles, flow, left, self.score, keep, one)
        stay = left.sum(1).tolist()
        if stay == counts:
            return None
        first = left.new_ones(rows, self.protected)
        merge = Merge.dropping(torch.cat([first, left], dim=1), [count + self.protected for count in stay])
        assert self.score is not None and merge.keep is not None
        self.score = self.score.gather(1, merge.keep[:, self.protected :] - self.protected)
        return merge


def _update_scores(
    tiles: Tiles, flow: torch.Tensor, left: torch.Tensor, score: torch.Tensor | None, goal: torch.Tensor, remaining: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what is left behind a block (bool `[S, N]`), and the scores so far (`[S, N]`). flow: `[S, 3, N]`, see
    `encoder_flow`; left, score: before it; goal, remaining: see `_stay`."""
    attention, alike, size = flow.float().nan_to_num(nan=0.0).unbind(1)
    part = _normalize_by_tile(tiles, attention, left)
    now = (part + _normalize_by_tile(tiles, alike, left)) * size
    score = now if score is None else (score + now) / 2
    if remaining % 2 == 0:
        left = tiles.top(score, _count_kept(tiles, part, left, goal, remaining), left)
    return left, score


def _normalize_by_tile(tiles: Tiles, score: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """float64 `[S, N]`: each score as a share of all that are `left` (bool `[S, N]`) of its tile."""
    score = score.double().masked_fill(~left, 0)
    total = torch.zeros(tiles.num_kept.shape, dtype=torch.double, device=score.device).scatter_add(
        1, tiles.index, score
    )
    return score / total.gather(1, tiles.index).clamp(min=torch.finfo(torch.float64).tiny)


def _count_kept(
    tiles: Tiles, part: torch.Tensor, left: torch.Tensor, goal: torch.Tensor, remaining: int
) -> torch.Tensor:
    """long `[S, T + 2]`: how many of each tile stay. part: `[S, N]`, shares of attention; goal: long `[S, T + 2]`, how
    many stay at last; remaining: blocks up to the last cut."""
    if not remaining:
        return goal
    number = tiles.count_selected(left)
    entropy = torch.zeros(number.shape, dtype=torch.double, device=part.device)
    entropy = entropy.scatter_add(1, tiles.index, -torch.special.xlogy(part, part))
    evenness = entropy / number.clamp(min=2).double().log()
    gone = ((number - goal).float() / remaining**0.5 * (1 - evenness.square())).round().long().clamp(min=0)
    return torch.maximum(number - gone, goal)
