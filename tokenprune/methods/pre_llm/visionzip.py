# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import rank_in_group
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import Tiles, compute_patch_attention
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
    """Keep the patches that the vision tower attends to most, and merge the others into a few evenly spread ones.

    Of each tile (or frame), the dominant tokens are those that the class token attends to most in the last block that
    the model reads; in towers without one, those that receive most attention. Of what remains, in raster order, every
    so many-th token is a contextual one, and each other joins the contextual token whose key in that block, the mean
    over heads, is most similar.

    context: share in [0, 1) of the kept tokens that are contextual, rounded for each tile; 0 drops what is not
    dominant. The default is the paper's 10 of 64.
    centre: weight in (0, 1] of a contextual token in its mean; those that join it share the rest. None: all alike.

    Source: Yang et al., "VisionZip: Longer is Better but Not Necessary in Vision Language Models", section on the
    method; the authors' code for keys, steps and the sum of target and mean.

    Differs from the paper: the class token has no place in the prompt, and its place goes to one more dominant patch;
    a contextual token is half of the authors' code's, which adds the mean of its members to it (twice the length, the
    same direction); tokens are merged after the projector, not before it; tiles share the budget in proportion to
    their patches, newline tokens go first; tokens keep their positions of the full prompt.
    """

    context: Annotated[float, Ge(0), Lt(1)] = 10 / 64
    centre: Annotated[float, Gt(0), Le(1)] | None = 0.5

    def select(self, tokens: VisualTokens) -> Selection:
        tiles = Tiles.from_tokens(tokens)
        context = (tiles.num_kept.float() * self.context + 0.5).long()
        context = tiles.zero_non_patches(torch.minimum(context, tiles.num_kept - 1).clamp(min=0))
        dominant = tiles.top(compute_patch_attention(tokens), tiles.num_kept - context)
        rest = tiles.is_patch & ~dominant
        targets = rest & _sample_evenly(tiles, rest, context)
        keep = dominant | targets
        joins = rest & ~targets & (tiles.expand(context) > 0)
        into = self._most_similar(tokens, tiles, targets)
        itself = torch.arange(keep.shape[1], device=keep.device)
        assign = torch.where(keep, itself, torch.where(joins, into, -1))
        return Selection(keep, assign, self._weights(into, joins), counts=tokens.keep)

    def _most_similar(self, tokens: VisualTokens, tiles: Tiles, targets: torch.Tensor) -> torch.Tensor:
        """long `[S, N]`: for each token the target of its tile with the most similar key."""
        heads = tokens.encoder_attention(-1).shape[1]
        keys = tokens.encoder_keys(-1).float().unflatten(-1, (heads, -1)).mean(dim=2)
        most = min(max(tokens.keep), int(max(tokens.keep) * self.context + tiles.num_tiles / 2) + 1)
        place = partition(targets)[:, :most]
        chosen, allowed, of = gather_tokens(keys, place, 1), targets.gather(1, place), tiles.index.gather(1, place)
        return place.gather(1, best_match(keys, chosen, allowed, group_a=tiles.index, group_b=of)[1])

    def _weights(self, into: torch.Tensor, joins: torch.Tensor) -> torch.Tensor | None:
        """float32 `[S, N]`: weight of each token in the mean that it goes into."""
        if self.centre is None:
            return None
        members = torch.zeros_like(into, dtype=torch.float32).scatter_add(1, into, joins.float())
        own = (members == 0).float().clamp(min=self.centre)
        return torch.where(joins, (1 - self.centre) / members.gather(1, into).clamp(min=1), own)


def _sample_evenly(tiles: Tiles, rest: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """bool `[S, N]`: of the `rest` of each tile every so many-th, from the first one on, `number` of them."""
    place = rank_in_group(torch.where(rest, tiles.index, tiles.num_tiles + 1))
    step = (tiles.count_selected(rest) // number.clamp(min=1)).clamp(min=1)
    return (place % tiles.expand(step) == 0) & (place // tiles.expand(step) < tiles.expand(number))
