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
        is_patch = (tokens.patches.tile >= 0) & tokens.mask
        num_strips = [
            min(count, self.crops or max(1, 16 * count // (9 * keep)))
            for count, keep in zip(tokens.counts, tokens.keep, strict=True)
        ]
        max_length = max(-(-count // num_kept) for count, num_kept in zip(tokens.counts, num_strips, strict=True))
        strip, sizes = _assign_strips(is_patch, tokens.mask, to_device(num_strips, is_patch.device), max(num_strips))

        attention = compute_patch_attention(tokens)
        share = torch.zeros(sizes.shape, dtype=torch.double, device=is_patch.device)
        share = share.scatter_add(1, strip, make_sortable(attention).clamp(min=0).double()) / sizes.clamp(min=1)
        num_kept = shares(share[:, :-2], tokens.budget, sizes[:, :-2], remainder="largest")
        num_others = tokens.budget - num_kept.sum(1)
        num_kept = torch.cat([num_kept, num_others[:, None], torch.zeros_like(num_others)[:, None]], dim=1)

        score = attention
        if self.rank == "holistic":
            score = _add_similarity_variance(attention, tokens.hidden, is_patch, sizes[:, :-2], max_length)
        return Selection(rank_in_group(strip, make_sortable(score)) < num_kept.gather(1, strip), counts=tokens.keep)


def _assign_strips(
    is_patch: torch.Tensor, mask: torch.Tensor, num_strips: torch.Tensor, max_strips: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the strip of each token, long `[S, N]`, and how many tokens each has, long `[S, most + 2]`; `most` stands
    for what is no patch, `most` + 1 for padding.

    patch, mask: bool `[S, N]`; numbers: long `[S]`, of strips, at most `most`. They are equally long, but the first
    ones have one more where the patches do not divide.
    """
    count = is_patch.sum(1, keepdim=True)
    num_strips = torch.minimum(num_strips[:, None], count).clamp(min=1)
    length, num_longer = count // num_strips, count % num_strips
    order, first_shorter = is_patch.cumsum(1) - 1, num_longer * (length + 1)
    later_strip = num_longer + (order - first_shorter).div(length.clamp(min=1), rounding_mode="floor")
    strip = torch.where(order < first_shorter, order // (length + 1), later_strip)
    strip = torch.where(is_patch, strip, max_strips).masked_fill(~mask, max_strips + 1)
    sizes = torch.zeros(len(strip), max_strips + 2, dtype=torch.long, device=strip.device)
    return strip, sizes.scatter_add(1, strip, torch.ones_like(strip))


def _add_similarity_variance(
    attention: torch.Tensor, x: torch.Tensor, is_patch: torch.Tensor, sizes: torch.Tensor, max_length: int
) -> torch.Tensor:
    """float32 `[S, N]`: attention, and the variance of a token's cosines to the others of its strip, on one scale.

    attention: `[S, N]`; x: `[S, N, D]`; patch: bool `[S, N]`; sizes: long `[S, C]`, none above `longest`.
    """
    in_strip = torch.arange(max_length, device=x.device) < sizes.unsqueeze(-1)  # [S, C, M]
    order = (sizes.cumsum(1) - sizes).unsqueeze(-1) + torch.arange(max_length, device=x.device)
    indices = partition(is_patch).gather(1, order.flatten(1).clamp(max=is_patch.shape[1] - 1))
    direction = unit(gather_tokens(x, indices, 1)).view(*in_strip.shape, -1) * in_strip.unsqueeze(-1)
    similarity = (direction @ direction.transpose(2, 3)).masked_fill(
        torch.eye(max_length, dtype=torch.bool, device=x.device), 0
    )
    num_others = (sizes - 1).clamp(min=1).unsqueeze(-1)
    mean = similarity.sum(3) / num_others
    # Of the entries of a strip, among them the token's own of 0.
    variance = (similarity - mean.unsqueeze(-1)).square().masked_fill(~in_strip.unsqueeze(2), 0).sum(3) / num_others
    scores = 1e3 * attention.gather(1, indices).view_as(mean).masked_fill(~in_strip, 0).nan_to_num(nan=0.0)
    variance = variance.masked_fill(~in_strip, 0)
    scale = scores.abs().sum(2) / (variance.sum(2) + 1e-6 * sizes).clamp(min=torch.finfo(torch.float32).tiny)
    combined = (scores + variance * scale.unsqueeze(-1)).masked_fill(~in_strip, 0).flatten(1)
    return torch.zeros_like(combined[:, :1]).expand_as(attention).scatter_add(1, indices, combined)
