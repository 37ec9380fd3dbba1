# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.pairs import unit
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import shares
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("holov", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2510.02912, NeurIPS 2025")
@dataclass(frozen=True)
class HoloV(Pruner):
    """Cut an image into strips, give each its part of the budget by the vision tower's attention to it, and keep the
    best of each strip (HoloV).

    A strip is a run of patches in raster order. Its part is its share of the attention, that of the class token in the
    last block that the model reads, or in towers without one, what patches receive on average. What a strip has no room
    for goes to the others.

    crops: int >= 1 or None, into how many strips an image is cut, at most one for each patch; None: 16/9 of the number
    of patches for each kept one, at least one: 16 where a ninth is kept, 5 where a third is.
    rank: "attention" keeps in each strip what has most of it, as the authors' code does; "holistic", as the paper says,
    what has most of it and of the variance of its similarities to the strip's other tokens together.

    Source: Zou et al., "Don't Just Chase "Highlighted Tokens" in MLLMs: Revisiting Visual Holistic Context Retention";
    the authors' code for strips, rounding, and their number on Qwen2.5-VL.

    Differs from the paper: where a strip is full, the rest of its part goes to the others in proportion (the authors'
    code appends zeros instead); a strip of one token counts as any other; kept tokens stay in their order, and keep
    their positions of the full prompt; newline tokens are in no strip and go first. That the variance enters the parts
    is left out, because it cancels there, and so is the paper's refetching of visual context, which has no code.
    """

    crops: Annotated[int, Ge(1)] | None = None
    rank: Literal["attention", "holistic"] = "attention"

    def select(self, tokens: VisualTokens) -> Selection:
        patch = (tokens.patches.tile >= 0) & tokens.mask
        numbers = [
            min(count, self.crops or max(1, 16 * count // (9 * keep)))
            for count, keep in zip(tokens.counts, tokens.keep, strict=True)
        ]
        longest = max(-(-count // number) for count, number in zip(tokens.counts, numbers, strict=True))
        strip, sizes = _assign_strips(patch, tokens.mask, to_device(numbers, patch.device), max(numbers))

        attention = compute_patch_attention(tokens)
        share = torch.zeros(sizes.shape, dtype=torch.double, device=patch.device)
        share = share.scatter_add(1, strip, make_sortable(attention).clamp(min=0).double()) / sizes.clamp(min=1)
        number = shares(share[:, :-2], tokens.budget, sizes[:, :-2], remainder="largest")
        others = tokens.budget - number.sum(1)
        number = torch.cat([number, others[:, None], torch.zeros_like(others)[:, None]], dim=1)

        score = attention
        if self.rank == "holistic":
            score = _add_similarity_variance(attention, tokens.hidden, patch, sizes[:, :-2], longest)
        return Selection(rank_in_group(strip, make_sortable(score)) < number.gather(1, strip), counts=tokens.keep)


def _assign_strips(
    patch: torch.Tensor, mask: torch.Tensor, numbers: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the strip of each token, long `[S, N]`, and how many tokens each has, long `[S, most + 2]`; `most` stands
    for what is no patch, `most` + 1 for padding.

    patch, mask: bool `[S, N]`; numbers: long `[S]`, of strips, at most `most`. They are equally long, but the first
    ones have one more where the patches do not divide.
    """
    count = patch.sum(1, keepdim=True)
    numbers = torch.minimum(numbers[:, None], count).clamp(min=1)
    length, longer = count // numbers, count % numbers
    place, edge = patch.cumsum(1) - 1, longer * (length + 1)
    behind = longer + (place - edge).div(length.clamp(min=1), rounding_mode="floor")
    strip = torch.where(place < edge, place // (length + 1), behind)
    strip = torch.where(patch, strip, most).masked_fill(~mask, most + 1)
    sizes = torch.zeros(len(strip), most + 2, dtype=torch.long, device=strip.device)
    return strip, sizes.scatter_add(1, strip, torch.ones_like(strip))


def _add_similarity_variance(
    attention: torch.Tensor, x: torch.Tensor, patch: torch.Tensor, sizes: torch.Tensor, longest: int
) -> torch.Tensor:
    """float32 `[S, N]`: attention, and the variance of a token's cosines to the others of its strip, on one scale.

    attention: `[S, N]`; x: `[S, N, D]`; patch: bool `[S, N]`; sizes: long `[S, C]`, none above `longest`.
    """
    inside = torch.arange(longest, device=x.device) < sizes.unsqueeze(-1)  # [S, C, M]
    spot = (sizes.cumsum(1) - sizes).unsqueeze(-1) + torch.arange(longest, device=x.device)
    at = partition(patch).gather(1, spot.flatten(1).clamp(max=patch.shape[1] - 1))
    direction = unit(gather_tokens(x, at, 1)).view(*inside.shape, -1) * inside.unsqueeze(-1)
    alike = (direction @ direction.transpose(2, 3)).masked_fill(
        torch.eye(longest, dtype=torch.bool, device=x.device), 0
    )
    others = (sizes - 1).clamp(min=1).unsqueeze(-1)
    mean = alike.sum(3) / others
    # Of the entries of a strip, among them the token's own of 0.
    spread = (alike - mean.unsqueeze(-1)).square().masked_fill(~inside.unsqueeze(2), 0).sum(3) / others
    scores = 1e3 * attention.gather(1, at).view_as(mean).masked_fill(~inside, 0).nan_to_num(nan=0.0)
    spread = spread.masked_fill(~inside, 0)
    scale = scores.abs().sum(2) / (spread.sum(2) + 1e-6 * sizes).clamp(min=torch.finfo(torch.float32).tiny)
    both = (scores + spread * scale.unsqueeze(-1)).masked_fill(~inside, 0).flatten(1)
    return torch.zeros_like(both[:, :1]).expand_as(attention).scatter_add(1, at, both)
