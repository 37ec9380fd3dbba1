# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import split_budget
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.tiles import compute_patch_attention, make_sortable
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("holov", site=Site.PRE_LLM, needs=("encoder_attention",), paper="arXiv 2510.02912, NeurIPS 2025")
@dataclass(frozen=True)
class HoloV(Pruner):
    """Keep the best patches of each strip of an image, with budgets by attention.

    A strip is a run of patches in raster order. Its budget is proportional to the mean attention of its patches: the
    class token's attention in the last block that the model reads, or the mean attention received in towers without a
    class token. Budget that exceeds the size of a strip goes to the other strips.

    Args:
        crops: Number of strips per image, at most the number of patches. None uses 16/9 of the patches per kept token,
            at least 1: 16 strips at keep=1/9 and 5 at keep=1/3.
        rank: Ranking within a strip. "attention" ranks by attention, as the authors' code does. "holistic" adds the
            variance of a patch's cosines to the other patches of the strip, as in the paper.

    Source:
        Zou et al., "Don't Just Chase "Highlighted Tokens" in MLLMs: Revisiting Visual Holistic Context Retention"
        (arXiv 2510.02912), and the authors' code for strips, rounding and the number of strips on Qwen2.5-VL.

    Differences from the paper:
        - Budget beyond the size of a strip goes to the other strips in proportion. The authors' code appends zeros
          instead.
        - A strip of one token is treated like any other strip.
        - Kept tokens stay in order and keep their positions in the prompt.
        - Newline tokens belong to no strip and are dropped first.
        - The variance term of the strip budgets is omitted, because it cancels.
        - The paper's refetching of visual context, which has no code, is not implemented.

    Examples:
        >>> model = tokenprune.patch(model, HoloV(crops=8), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    crops: Annotated[int, Ge(1)] | None = None
    rank: Literal["attention", "holistic"] = "attention"

    def select(self, tokens: VisualTokens) -> Selection:
        is_patch = (tokens.patches.tile >= 0) & tokens.mask
        num_strips = [
            min(count, self.crops or max(1, 16 * count // (9 * keep)))
            for count, keep in zip(tokens.counts, tokens.keep, strict=True)
        ]
        max_length = max(-(-count // strips) for count, strips in zip(tokens.counts, num_strips, strict=True))
        strip, sizes = _assign_strips(is_patch, tokens.mask, to_device(num_strips, is_patch.device), max(num_strips))

        attention = compute_patch_attention(tokens)
        share = torch.zeros(sizes.shape, dtype=torch.double, device=is_patch.device)
        share = share.scatter_add(1, strip, make_sortable(attention).clamp(min=0).double()) / sizes.clamp(min=1)
        num_kept = split_budget(share[:, :-2], tokens.budget, sizes[:, :-2], remainder="largest")
        num_others = tokens.budget - num_kept.sum(1)
        num_kept = torch.cat([num_kept, num_others[:, None], torch.zeros_like(num_others)[:, None]], dim=1)

        score = attention
        if self.rank == "holistic":
            score = _add_similarity_variance(attention, tokens.hidden, is_patch, sizes[:, :-2], max_length)
        return Selection(rank_in_group(strip, make_sortable(score)) < num_kept.gather(1, strip), counts=tokens.keep)


def _assign_strips(
    is_patch: torch.Tensor, mask: torch.Tensor, num_strips: torch.Tensor, max_strips: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the strip of each token, long (S, N), and the size of each strip, long (S, max_strips + 2).

    Strips have equal lengths, except that the first ones have one more patch if the patches do not divide evenly. Index
    `max_strips` holds tokens that are not patches, `max_strips + 1` holds padding.

    Args:
        is_patch: Patches, bool (S, N).
        mask: Valid tokens, bool (S, N).
        num_strips: Number of strips of each image, long (S,).
        max_strips: Maximum of `num_strips`.
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
    """Return attention plus the rescaled variance of a token's cosines to its strip, float32 (S, N).

    Args:
        attention: Attention of each token, (S, N).
        x: Tokens, (S, N, D).
        is_patch: Patches, bool (S, N).
        sizes: Size of each strip, long (S, C).
        max_length: At least the largest strip.
    """
    in_strip = torch.arange(max_length, device=x.device) < sizes.unsqueeze(-1)  # [S, C, M]
    order = (sizes.cumsum(1) - sizes).unsqueeze(-1) + torch.arange(max_length, device=x.device)
    indices = partition(is_patch).gather(1, order.flatten(1).clamp(max=is_patch.shape[1] - 1))
    direction = normalize(gather_tokens(x, indices, 1)).view(*in_strip.shape, -1) * in_strip.unsqueeze(-1)
    similarity = (direction @ direction.transpose(2, 3)).masked_fill(
        torch.eye(max_length, dtype=torch.bool, device=x.device), 0
    )
    num_others = (sizes - 1).clamp(min=1).unsqueeze(-1)
    mean = similarity.sum(3) / num_others
    # The sum includes the zeros on the diagonal.
    variance = (similarity - mean.unsqueeze(-1)).square().masked_fill(~in_strip.unsqueeze(2), 0).sum(3) / num_others
    scores = 1e3 * attention.gather(1, indices).view_as(mean).masked_fill(~in_strip, 0).nan_to_num(nan=0.0)
    variance = variance.masked_fill(~in_strip, 0)
    scale = scores.abs().sum(2) / (variance.sum(2) + 1e-6 * sizes).clamp(min=torch.finfo(torch.float32).tiny)
    combined = (scores + variance * scale.unsqueeze(-1)).masked_fill(~in_strip, 0).flatten(1)
    return torch.zeros_like(combined[:, :1]).expand_as(attention).scatter_add(1, indices, combined)
