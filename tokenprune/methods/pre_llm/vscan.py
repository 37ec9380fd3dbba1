# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import plan_cuts
from tokenprune.errors import BudgetError
from tokenprune.kernels.match import match_selected
from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.segments import Patches
from tokenprune.selection.tokens import VisualTokens


@register("vscan", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2505.22654, TMLR 2026", merges=True)
@dataclass(frozen=True)
class VScan(Pruner):
    """Pick patches globally and by window from tower attention, merge the rest, and cut again later.

    Stage 1 acts before the decoder. In each tile or frame, one part of the tokens is picked window by window, by the
    attention of an early tower block. The other part is picked among all remaining patches, by the attention of the
    last block that the model reads. The attention is the class token's, or the mean that a patch receives in towers
    without a class token. Every other token is merged into the most similar picked token of its tile. Stage 2 acts
    inside the decoder and keeps a third of the tokens, by the attention of the last prompt token. `keep` is an average
    over decoder layers.

    Args:
        layer: Decoder layer at whose input stage 2 cuts, >= 1, ranked by the attention of this layer. None uses the
            middle layer.
        stage2: False omits stage 2. The choice then does not depend on the question, works with a prefix cache, and
            stage 1 keeps all of `keep`.
        local: Share in [0, 1] of stage 1's tokens that is picked by window.
        local_layer: Early tower block, as an int (see `Pruner.encoder_layers`) or a share of the depth between 0 and 1.
        window: Side of a window in tokens. None uses 6 if a token is one patch, otherwise 4. Leftover rows and columns
            belong to the last window.
        merge: Merge the tokens that are not picked. False drops them.

    Source:
        Zhang et al., "VScan: Rethinking Visual Token Reduction for Efficient Large Vision-Language Models" (arXiv
        2505.22654), method section, and the authors' code for blocks, windows, schedule and the unweighted mean.

    Differences from the paper:
        - Kept tokens keep their positions in the prompt. The authors' LLaVA code renumbers them.
        - If local picks do not divide by the number of windows, the remaining picks go to the best next-ranked patches
          of all windows. The LLaVA code drops them, and the Qwen code picks greedily under a cap.
        - Tiles share the picks by their tokens after unpadding.
        - Newlines are always kept by stage 1, count toward the budget, and compete in stage 2.
        - Keys and queries are rotated once, in the tower and in the decoder. The Qwen code rotates them twice or not at
          all.
        - A local pick is never picked again.
        - Tokens of a tile without picks are merged into the most similar picks of other tiles.

    Examples:
        >>> model = tokenprune.patch(model, VScan(stage2=False), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True
    query_free: ClassVar[Mapping[str, Any]] = {"stage2": False}

    layer: Annotated[int, Ge(1)] | None = None
    stage2: bool = True
    local: Annotated[float, Ge(0), Le(1)] = 0.5
    local_layer: int | Annotated[float, Gt(0), Lt(1)] = 0.25
    window: Annotated[int, Ge(1)] | None = None
    merge: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        problem = f"layer={self.layer} has no effect with stage2=False. Remove one option."
        self._check(self.stage2 or self.layer is None, problem)

    @property
    def query_aware(self) -> bool:
        return self.stage2

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        return self.local_layer, -1

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        if budget.per != "image":
            raise BudgetError(f'vscan does not support {budget}: it prunes each image by itself. Pass per="image".')
        first = dataclasses.replace(self, stage2=False, layer=None)
        if not self.stage2:
            return [(first, budget)]
        layer = layers // 2 if self.layer is None else self.layer
        self._check(1 <= layer < layers, f"layer={layer} is out of range: the decoder has {layers} layers")
        early, late = plan_cuts(layers, ((0, 3.0), (layer, 1.0)), budget)
        return [(first, early.budget), (_SecondStage(layer), late.budget)]

    def select(self, tokens: VisualTokens) -> Selection:
        patches = tokens.patches
        local, last = (tokens.encoder_attention(layer).mean(dim=1) for layer in self.encoder_layers)
        picked = self._pick(tokens, local.nan_to_num(nan=-torch.inf), last.nan_to_num(nan=-torch.inf))
        keep = picked | (tokens.mask & (patches.tile < 0))
        if not self.merge:
            return Selection(keep)
        itself = torch.arange(keep.shape[1], device=keep.device)
        assign = torch.where(keep, itself, match_selected(tokens.hidden, picked, max(tokens.keep), patches.tile))
        return Selection(keep, assign.masked_fill(~tokens.mask, -1))

    def _pick(self, tokens: VisualTokens, local: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Return the patches that either scan picks, bool (S, N).

        Args:
            tokens: Visual tokens.
            local: Attention of the early block, (S, N).
            last: Attention of the last block, (S, N).
        """
        patches, mask = tokens.patches, tokens.mask
        is_patch = patches.tile >= 0
        tiles = patches.tiles
        tile = torch.where(is_patch, patches.tile, tiles)  # other tokens form a tile without picks
        num_patches_kept = (tokens.budget - (mask & ~is_patch).sum(1)).clamp(min=1)
        num_picks = split_among_tiles(
            torch.zeros_like(tile[:, :1]).expand(-1, tiles + 1).scatter_add(1, tile, is_patch.long()), num_patches_kept
        )
        num_local = (num_picks.double() * self.local).long()
        # The best patch of each window comes first, then the second best of each.
        rank_in_window = rank_in_group(
            tile * patches.height.amax() * patches.width.amax() + assign_windows(patches, self.window), local
        )
        local_picks = rank_in_group(tile, -rank_in_window, local) < num_local.gather(1, tile)
        global_picks = rank_in_group(tile, (~local_picks).byte(), last) < (num_picks - num_local).gather(1, tile)
        return is_patch & (local_picks | global_picks)


def split_among_tiles(counts: torch.Tensor, total_picks: torch.Tensor) -> torch.Tensor:
    """Split `total_picks` among tiles in proportion to their tokens, long (S, T).

    The first tiles get the remainder.

    Args:
        counts: Number of tokens of each tile, long (S, T).
        total_picks: Number of picks of each segment, long (S,).
    """
    total = counts.sum(1, keepdim=True).clamp(min=1)
    cumulative = (counts.cumsum(1) * total_picks[:, None] + total - 1).div(total, rounding_mode="floor")
    return cumulative.diff(dim=1, prepend=torch.zeros_like(cumulative[:, :1]))


def assign_windows(patches: Patches, side: int | None) -> torch.Tensor:
    """Return the window index of each patch in its tile, long (S, N). Leftover patches belong to the last window."""
    sides = torch.where(patches.size > 1, 4, 6) if side is None else torch.full_like(patches.size, side)
    down, across = ((length // sides).clamp(min=1) for length in (patches.height, patches.width))
    row, column = torch.minimum(patches.row // sides, down - 1), torch.minimum(patches.column // sides, across - 1)
    return row * across + column


@dataclass(frozen=True)
class _SecondStage(Pruner):
    """Stage 2: keep the tokens with the most attention from the last prompt token, at the input of layer `layer`."""

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True

    layer: int

    name: ClassVar[str] = "vscan"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"next_row_attention"})

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.next_row_attention.mean(dim=1)
