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

_CLIP_BLOCKS = 23  # blocks of CLIP-L that LLaVA uses
_LAST_CUT = _CLIP_BLOCKS - 2  # index of the block before the last cut


@register("flowcut", site=Site.PRE_LLM, needs=("encoder_flow",), paper="arXiv 2505.19536, NeurIPS 2025")
@dataclass(frozen=True)
class FlowCut(Pruner):
    """Drop patches step by step by their information flow in the tower.

    In each block, the score of a patch adds two shares: its attention from the class token and the similarity of its
    value to the class token's value. The sum is multiplied by the norm of the value and averaged with the score so far.
    Every second block drops the patches with the lowest scores, more if the attention is concentrated. The last cut
    reaches the budget exactly. Each tile, or frame of a video, is pruned by itself.

    Args:
        inside: True cuts inside the tower as the authors do, so later blocks process only the remaining patches. This
            requires a CLIP or SigLIP tower, one tile per image, and one visual token per patch; `keep` then is a share
            or number of patches. False selects tokens after the tower. None cuts inside where possible.

    Source:
        Tong et al., "FlowCut: Rethinking Redundancy via Information Flow for Efficient Vision-Language Models" (arXiv
        2505.19536), and the authors' code for the scores, the blocks that cut and the number of dropped patches.

    Differences from the paper:
        - Selecting after the tower (`inside=False`) is not the authors' algorithm. The tower then saves no work, and
          the scores of each block come from the tower with all patches.
        - In a tower of another depth than CLIP-L's, the 22 scored blocks are spread evenly over the depth.
        - In towers without a class token, the score is the mean attention that a patch receives multiplied by the norm
          of its value.
        - For LLaVA-NeXT and Qwen2-VL, the authors keep twice as many tokens in the tower and cut again by the question
          in the decoder. That cut is not implemented.
        - An image gets the same result in a batch and by itself. The authors' code drops the same number in all images
          of a batch.
        - Tiles share the budget in proportion to their patches, and newline tokens are dropped first.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, FlowCut(inside=False), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    syncs_device: ClassVar[bool] = True

    inside: bool | None = None

    @property
    def preferred(self) -> Method:
        return replace(self, inside=True) if self.inside is None else self

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        return [(_InTower() if self.inside else self, budget)]

    @property
    def encoder_layers(self) -> tuple[float, ...]:
        # The middle of each of 23 equal parts of the depth, up to the last cut.
        return tuple((block + 0.5) / _CLIP_BLOCKS for block in range(_LAST_CUT + 1))

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        patches, num_final = tiles.is_patch, tiles.zero_non_patches(tiles.num_kept)
        score: torch.Tensor | None = None
        for block, layer in enumerate(self.encoder_layers):
            flow = tokens.encoder_flow(layer)
            patches, score = _update_scores(tiles, flow, patches, score, num_final, _LAST_CUT - block)
        assert score is not None  # the tower has blocks
        # Other tokens are kept only if the budget exceeds the number of patches.
        return Selection(tiles.top(score, tiles.num_kept, patches | ~tiles.is_patch), counts=tokens.keep)


@dataclass(frozen=True)
class _InTower(EncoderMethod):
    """Drop patches inside the tower, between attention and MLP. Kept patches equal those of a cut after the MLP."""

    inexact: ClassVar[None] = None
    name: ClassVar[str] = "flowcut"
    proportional = False
    ragged = True
    reads = "encoder_flow"

    def plan(self, budget: Budget, tower: Tower) -> list[Matcher | None]:
        """Return the function that drops patches after each block, or None for blocks that are not scored."""
        cuts = _TowerCuts(tower.protected, tower.count_kept(budget))
        steps_of_block: list[list[int]] = [[] for _ in range(tower.blocks)]
        for block in range(_LAST_CUT + 1):
            steps_of_block[math.ceil((block + 0.5) / _CLIP_BLOCKS * tower.blocks_read) - 1].append(_LAST_CUT - block)
        return [partial(cuts.update, remaining=tuple(steps)) if steps else None for steps in steps_of_block]


@dataclass
class _TowerCuts:
    """Scores and cuts of one forward of the tower.

    Attributes:
        protected: Number of class tokens.
        keep: Number of patches of each image after the last cut.
        score: Running score of the remaining patches, (B, n), or None before the first scored block.
    """

    protected: int
    keep: int
    score: torch.Tensor | None = None

    def update(self, flow: torch.Tensor, counts: list[int] | None, remaining: tuple[int, ...]) -> Merge | None:
        """Update the scores after a block and return the merge that drops patches, or None.

        Args:
            flow: Attention, similarity and norm of each patch, (B, 3, n).
            counts: Number of tokens of each image, or None if all images have the same number.
            remaining: Number of blocks up to the last cut, one entry for each scored step that falls into this block.
        """
        rows, _, width = flow.shape
        counts = [width] * rows if counts is None else [count - self.protected for count in counts]
        num_patches = to_device(counts, flow.device)[:, None]
        patches = torch.arange(width, device=flow.device) < num_patches
        # Each image is tile 0; padding has index 2.
        keep = torch.tensor([[self.keep, 0, 0]], device=flow.device).expand(rows, -1)
        tile_index = torch.where(patches, 0, 2)
        tiles = Tiles(tile_index, keep, torch.zeros_like(keep).scatter_add(1, tile_index, torch.ones_like(tile_index)))
        for blocks_to_cut in remaining:
            patches, self.score = _update_scores(tiles, flow, patches, self.score, keep, blocks_to_cut)
        num_kept = patches.sum(1).tolist()
        if num_kept == counts:
            return None
        class_tokens = patches.new_ones(rows, self.protected)
        merge = Merge.from_kept(
            torch.cat([class_tokens, patches], dim=1), [count + self.protected for count in num_kept]
        )
        assert self.score is not None and merge.keep is not None
        self.score = self.score.gather(1, merge.keep[:, self.protected :] - self.protected)
        return merge


def _update_scores(
    tiles: Tiles,
    flow: torch.Tensor,
    patches: torch.Tensor,
    score: torch.Tensor | None,
    num_final: torch.Tensor,
    remaining: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the remaining patches after a block, bool (S, N), and the updated scores, (S, N).

    Args:
        tiles: Tiles of the tokens.
        flow: Attention, similarity and norm of each patch, (S, 3, N).
        patches: Remaining patches before the block, bool (S, N).
        score: Scores so far, or None in the first block.
        num_final: Number of kept tokens of each tile after the last cut, long (S, T + 2).
        remaining: Number of blocks up to the last cut.
    """
    attention, similarity, size = flow.float().nan_to_num(nan=0.0).unbind(1)
    attention_share = _normalize_by_tile(tiles, attention, patches)
    block_score = (attention_share + _normalize_by_tile(tiles, similarity, patches)) * size
    score = block_score if score is None else (score + block_score) / 2
    if remaining % 2 == 0:
        patches = tiles.top(score, _count_kept(tiles, attention_share, patches, num_final, remaining), patches)
    return patches, score


def _normalize_by_tile(tiles: Tiles, score: torch.Tensor, patches: torch.Tensor) -> torch.Tensor:
    """Divide each score by the sum over the remaining patches of its tile, float64 (S, N)."""
    score = score.double().masked_fill(~patches, 0)
    total = torch.zeros(tiles.num_kept.shape, dtype=torch.double, device=score.device).scatter_add(
        1, tiles.index, score
    )
    return score / total.gather(1, tiles.index).clamp(min=torch.finfo(torch.float64).tiny)


def _count_kept(
    tiles: Tiles, attention_share: torch.Tensor, patches: torch.Tensor, num_final: torch.Tensor, remaining: int
) -> torch.Tensor:
    """Return the number of tokens that each tile keeps after a block, long (S, T + 2)."""
    if not remaining:
        return num_final
    num_patches = tiles.count_selected(patches)
    entropy = torch.zeros(num_patches.shape, dtype=torch.double, device=attention_share.device)
    entropy = entropy.scatter_add(1, tiles.index, -torch.special.xlogy(attention_share, attention_share))
    evenness = entropy / num_patches.clamp(min=2).double().log()
    num_dropped = (num_patches - num_final).float() / remaining**0.5 * (1 - evenness.square())
    num_dropped = num_dropped.round().long().clamp(min=0)
    return torch.maximum(num_patches - num_dropped, num_final)
