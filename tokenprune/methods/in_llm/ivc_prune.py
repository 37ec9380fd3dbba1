# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from tokenprune.budgets import Budget
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens

_SEEDS = 0.01  # of an image's tokens
_SKIPPED = 2  # tokens after an image, what closes it in the prompt


@register("ivc_prune", site=Site.IN_LLM, needs=("value_heads", "rotation"), paper="arXiv 2602.03060, ICLR 2026")
@dataclass(frozen=True)
class IvcPrune(Pruner):
    """Keep the visual tokens whose positions serve the model as coordinates, and of the others those whose values are
    most like the question's (IVC-Prune).

    Coordinates are the tokens whose rotary angles have the largest mean cosine, and those with the largest mean sine.
    Seeds are the tokens that the values of the text after the image are most like; with that text they rate the rest.
    The first two tokens of the text rate nothing, unless there are no others.

    layer: int >= 1, the decoder layer at whose input the cut is made, by values of the layer before it; None: half of
    the layers, 16 of 32.
    coordinates: share in [0, 0.5] of an image's tokens that are kept for their cosine, and as many for their sine; at
    most a quarter of what is kept each.

    Source: "IVC-Prune: Revealing the Implicit Visual Coordinates in LVLMs for Vision Token Pruning", the summary and
    the authors' code: softmax of the products of value vectors over the root of their width, each head by itself,
    without a causal mask, mean over heads.

    Differs from the paper: `keep` is exact, first coordinates, then seeds, then the best of the rest (for LLaVA its
    code keeps a union). The softmax is over the image and the text after it (there over the whole prompt for LLaVA,
    and over the image alone for Qwen-VL). Where positions have several axes (M-RoPE), an angle is that of the axis that
    the layer turns it by (the code takes the mean of all three axes). Layers before the cut keep their keys and values;
    there these are thrown away too. Several images have a budget each.
    """

    query_aware: ClassVar[bool] = True

    layer: Annotated[int, Ge(1)] | None = None
    coordinates: Annotated[float, Ge(0), Le(0.5)] = 0.05

    @property
    def cut_layer(self) -> int:
        return self.layer or 0

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        return [(dataclasses.replace(self, layer=self.layer or max(1, layers // 2)), budget)]

    def select(self, tokens: VisualTokens) -> Selection:
        mask, keep, device = tokens.mask, tokens.keep, tokens.mask.device
        cos, sin = (one.float().mean(-1) for one in tokens.rotation)
        each = [
            min(round(self.coordinates * count), number // 4) for count, number in zip(tokens.counts, keep, strict=True)
        ]
        number = to_device(each, device)
        anchors = top_mask(cos, mask, number, max(each)) | top_mask(sin, mask, number, max(each))

        text = tokens.text.mask
        there = torch.cat([mask, text], dim=1)
        values = torch.cat([tokens.value_heads, tokens.text.value_heads], dim=1).float()
        values = values.masked_fill(~there[:, :, None, None], 0)
        place = text.cumsum(1)
        raters = text & ((place > _SKIPPED) | (place[:, -1:] <= _SKIPPED))
        rated = _likeness(tokens.text.value_heads, raters, values, there)[..., : mask.shape[1]].sum(1)
        seeds = [max(1, round(_SEEDS * count)) for count in tokens.counts]
        seed = top_mask(rated, mask, to_device(seeds, device), max(seeds))
        seed_index = partition(seed)[:, : max(seeds)]  # the seeds, then others
        own = gather_tokens(values, seed_index, 1)
        from_seeds = _likeness(own, seed.gather(1, seed_index), values, there)[..., : mask.shape[1]].sum(1)
        score = (rated + from_seeds) / (raters.sum(1) + seed.sum(1))[:, None]

        first = torch.where(anchors, 2, torch.where(seed, 1, 0))
        # In order of rank, then of score: a mean of shares of a softmax is at most 1.
        return Selection.top(first * 2 + score.nan_to_num(nan=-1.0).clamp(-1, 1), tokens)


def _likeness(of: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """float32 `[S, R, T]`: how alike the values `of` `[S, R, H, D]` are to each of `values` `[S, T, H, D]`: a softmax
    over those that are `there` (bool `[S, T]`), mean over heads; 0 in rows that do not count (bool `[S, R]`)."""
    found = []
    for one, row in zip(of.float().split(256, dim=1), rows.split(256, dim=1), strict=True):
        product = torch.einsum("srhd,sthd->shrt", one, values) / values.shape[-1] ** 0.5
        share = product.masked_fill(~there[:, None, None, :], -torch.inf).softmax(-1).mean(1)
        found.append(share.masked_fill(~row[:, :, None], 0))
    return torch.cat(found, dim=1)
