# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.match import match_selected
from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register(
    "visionzip",
    site=Site.PRE_LLM,
    needs=("encoder_attention", "encoder_keys"),
    paper="arXiv 2412.04467, CVPR 2025",
    merges=True,
)
@dataclass(frozen=True)
class VisionZip(Pruner):
    """Keep the most attended patches and merge the others into a few.

    In each tile or frame, dominant tokens have the most attention from the class token in the last block that the model
    reads. In towers without a class token, the attention is the mean that a patch receives. Contextual tokens are
    evenly spaced over the remaining patches in raster order. Every other remaining patch is merged into the contextual
    token with the most similar key in that block, averaged over heads.

    Args:
        context: Share in [0, 1) of the kept tokens that are contextual, rounded for each tile. 0 drops all other
            patches. The default is the paper's 10 of 64.
        centre: Weight in (0, 1] of a contextual token in its mean; the merged patches share the rest. None weights all
            tokens equally.

    Source:
        Yang et al., "VisionZip: Longer is Better but Not Necessary in Vision Language Models" (arXiv 2412.04467),
        method section, and the authors' code for keys, spacing and the sum of target and mean.

    Differences from the paper:
        - The class token is not in the prompt. One more dominant patch replaces it.
        - A contextual token is half of the authors', whose code adds the mean of its patches to it. The direction is
          equal.
        - Tokens are merged after the projector, not before it.
        - Tiles share the budget in proportion to their patches, and newline tokens are dropped first.
        - Kept tokens keep their positions in the prompt.

    Examples:
        >>> model = tokenprune.patch(model, VisionZip(context=0.25), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    context: Annotated[float, Ge(0), Lt(1)] = 10 / 64
    centre: Annotated[float, Gt(0), Le(1)] | None = 0.5

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        key = ("visionzip", self.context, *tokens.keep)
        num_dominant, step, end, has_context = tokens.patches.cache.get(key, lambda: self._split_budget(tiles))
        dominant = rank_in_group(tiles.index, make_sortable(compute_patch_attention(tokens))) < num_dominant
        # The remaining patches of a tile are sampled evenly, starting with the first.
        is_taken = dominant | tiles.is_other
        order, rest = rank_in_group(tiles.index.masked_fill(is_taken, tiles.num_tiles + 1)), ~is_taken
        targets = rest & (order % step == 0) & (order < end)
        keep = dominant | targets
        joins = (rest ^ targets) & has_context
        target = self._find_most_similar(tokens, tiles, targets)
        assign = torch.where(keep, tiles.token_index, torch.where(joins, target, -1))
        return Selection(keep, assign, self._compute_weights(target, joins), counts=tokens.keep)

    def _split_budget(self, tiles: Tiles) -> tuple[torch.Tensor, ...]:
        """Return the plan of each token's tile, (S, N).

        The plan is the number of dominant patches, the distance of contextual patches, the end of their range, and
        whether there are any.
        """
        num_context = (tiles.num_kept.float() * self.context + 0.5).long()
        num_context = tiles.zero_non_patches(torch.minimum(num_context, tiles.num_kept - 1).clamp(min=0))
        num_dominant = tiles.num_kept - num_context
        step = ((tiles.sizes - num_dominant) // num_context.clamp(min=1)).clamp(min=1)
        plan = (num_dominant, step, num_context * step, num_context)
        num_dominant, step, end, num_context = (tiles.expand(values) for values in plan)
        return num_dominant, step, end, num_context > 0

    def _find_most_similar(self, tokens: VisualTokens, tiles: Tiles, targets: torch.Tensor) -> torch.Tensor:
        """Return the target of the same tile with the most similar key for each token, long (S, N)."""
        heads = tokens.encoder_attention(-1).shape[1]
        keys = tokens.encoder_keys(-1).float().unflatten(-1, (heads, -1)).mean(dim=2)
        max_targets = min(max(tokens.keep), int(max(tokens.keep) * self.context + tiles.num_tiles / 2) + 1)
        return match_selected(keys, targets, max_targets, tiles.index if tiles.num_tiles > 1 else None)

    def _compute_weights(self, target: torch.Tensor, joins: torch.Tensor) -> torch.Tensor | None:
        """Return the weight of each token in the mean of its target, float32 (S, N)."""
        if self.centre is None:
            return None
        members = torch.zeros_like(target, dtype=torch.float32).scatter_add(1, target, joins.float())
        own_weight = (1 - members).clamp(min=self.centre)  # 1 without members
        return torch.where(joins, (1 - self.centre) / members.gather(1, target).clamp(min=1), own_weight)
