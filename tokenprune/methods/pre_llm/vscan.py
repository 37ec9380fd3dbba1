# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import profile
from tokenprune.errors import BudgetError
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.segments import Patches
from tokenprune.selection.tokens import VisualTokens


@register("vscan", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2505.22654, TMLR 2026", merges=True)
@dataclass(frozen=True)
class VScan(Pruner):
    """Scan the vision tower's attention globally and window by window, merge what is not picked, cut again halfway.

    Stage 1, before the decoder: one part of each tile's tokens (or frame's) is picked window by window by the attention
    of an early block of the tower, the rest among all others by the attention of the last block that the model reads.
    Scores are the class token's attention to a patch, or, in towers without one, what the patch receives on average.
    Every other token is merged into the most similar picked one of its tile. Stage 2, inside the decoder: the third of
    them that the last prompt token attends to most goes on.

    keep: tokens averaged over the decoder's layers; stage 1 keeps three times as many as stage 2, as far as there are.
    layer: int >= 1 or None (the middle), decoder layer at whose input stage 2 cuts, ranked by that layer's own
    attention.
    stage2: False leaves out stage 2: the choice then knows nothing of the question and is safe with a prefix cache;
    stage 1 keeps all of `keep`.
    local: share in [0, 1] of stage 1's picks that is made window by window.
    local_layer: the early block, an int (see `Pruner.encoder_layers`) or a share of the depth between 0 and 1.
    window: side of a window in tokens; None is 6 where a token is one patch, 4 where it is several. What does not fill
    a window belongs to the last one.
    merge: False drops what is not picked.

    Source: Zhang et al., "VScan: Rethinking Visual Token Reduction for Efficient Large Vision-Language Models", section
    on the method; the authors' code for what it leaves open (blocks, windows, schedule, plain mean).

    Differs from the paper: tokens keep their positions of the full prompt (the LLaVA code renumbers them); where the
    windows do not divide the local picks, each window gets its equal part and the best of the next ones get the rest
    (the LLaVA code drops the rest, the Qwen code picks greedily under a cap); tiles share the picks by their tokens
    that are left after unpadding; newlines are always kept by stage 1, count as kept, and compete in stage 2; keys and
    queries are rotated once in tower and decoder (the Qwen code twice, or not at all); a local pick is never picked
    again; a tile of which nothing is picked is merged into the most similar picks of the other tiles.
    """

    asks_device: ClassVar[bool] = True
    query_free: ClassVar[Mapping[str, Any]] = {"stage2": False}

    layer: Annotated[int, Ge(1)] | None = None
    stage2: bool = True
    local: Annotated[float, Ge(0), Le(1)] = 0.5
    local_layer: int | Annotated[float, Gt(0), Lt(1)] = 0.25
    window: Annotated[int, Ge(1)] | None = None
    merge: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"layer={self.layer} is where stage 2 cuts: leave it out, or stage2=False"
        self._check(self.stage2 or self.layer is None, problem)

    @property
    def query_aware(self) -> bool:
        return self.stage2

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        return self.local_layer, -1

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.per != "image":
            raise BudgetError(f"vscan scans each image by itself: it cannot share {budget} among them")
        first = dataclasses.replace(self, stage2=False, layer=None)
        if not self.stage2:
            return [(first, budget)]
        layer = layers // 2 if self.layer is None else self.layer
        self._check(1 <= layer < layers, f"layer={layer} is out of range: this decoder has {layers} layers")
        # Stage 1 keeps three times as many as stage 2, as far as there are so many.
        early, late = profile(layers, ((0, 3.0), (layer, 1.0)), budget)
        return [(first, early.budget), (_SecondStage(layer), late.budget)]

    def select(self, tokens: VisualTokens) -> Selection:
        patches = tokens.patches
        local, last = (tokens.encoder_attention(layer).mean(dim=1) for layer in self.encoder_layers)
        picked = self._pick(tokens, local.nan_to_num(nan=-torch.inf), last.nan_to_num(nan=-torch.inf))
        keep = picked | (tokens.mask & (patches.tile < 0))
        if not self.merge:
            return Selection(keep)
        itself = torch.arange(keep.shape[1], device=keep.device)
        assign = torch.where(keep, itself, find_most_similar(tokens.hidden, picked, patches.tile, max(tokens.keep)))
        return Selection(keep, assign.masked_fill(~tokens.mask, -1))

    def _pick(self, tokens: VisualTokens, local: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """bool `[S, N]`: the patches that either scan picks. local, last: the scores of the two, `[S, N]`."""
        patches, mask = tokens.patches, tokens.mask
        real = patches.tile >= 0
        tiles = patches.tiles
        tile = torch.where(real, patches.tile, tiles)  # what is no patch is in a tile that picks nothing
        wanted = (tokens.budget - (mask & ~real).sum(1)).clamp(min=1)
        picks = split_among_tiles(
            torch.zeros_like(tile[:, :1]).expand(-1, tiles + 1).scatter_add(1, tile, real.long()), wanted
        )
        scanned = (picks.double() * self.local).long()
        # Best of each window first, then second best of each, and so on.
        turn = rank_in_group(
            tile * patches.height.amax() * patches.width.amax() + assign_windows(patches, self.window), local
        )
        near = rank_in_group(tile, -turn, local) < scanned.gather(1, tile)
        far = rank_in_group(tile, (~near).byte(), last) < (picks - scanned).gather(1, tile)
        return real & (near | far)


def split_among_tiles(counts: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Split `wanted` (long `[S]`) among tiles of `counts` (long `[S, T]`) tokens: proportionally, none gets more than
    it has, and what does not divide goes to the first ones."""
    total = counts.sum(1, keepdim=True).clamp(min=1)
    up_to = (counts.cumsum(1) * wanted[:, None] + total - 1).div(total, rounding_mode="floor")
    return up_to.diff(dim=1, prepend=torch.zeros_like(up_to[:, :1]))


def assign_windows(patches: Patches, side: int | None) -> torch.Tensor:
    """long `[S, N]`: the number of each patch's window in its tile; what is left over belongs to the last one."""
    sides = torch.where(patches.size > 1, 4, 6) if side is None else torch.full_like(patches.size, side)
    down, across = ((length // sides).clamp(min=1) for length in (patches.height, patches.width))
    row, column = torch.minimum(patches.row // sides, down - 1), torch.minimum(patches.column // sides, across - 1)
    return row * across + column


def find_most_similar(features: torch.Tensor, picked: torch.Tensor, tile: torch.Tensor, most: int) -> torch.Tensor:
    """long `[S, N]`: for each token the picked one of its tile that is most similar by cosine, the first of equals; of
    any tile where its own has none. most: at least the largest number of picked ones."""
    place = partition(picked)[:, :most]
    chosen, allowed, of = gather_tokens(features, place, 1), picked.gather(1, place), tile.gather(1, place)
    return place.gather(1, best_match(features, chosen, allowed, group_a=tile, group_b=of)[1])


@dataclass(frozen=True)
class _SecondStage(Pruner):
    """Stage 2: keep what the last prompt token attends to most in the layer after the cut.

    layer: where it cuts.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True

    layer: int

    name: ClassVar[str] = "vscan"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"next_row_attention"})

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.next_row_attention.mean(dim=1)
