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

_SEEDS = 0.01  # seeds, as a share of an image's tokens
_SKIPPED = 2  # text tokens after an image that only close the image in the prompt


@register("ivc_prune", site=Site.IN_LLM, needs=("value_heads", "rotation"), paper="arXiv 2602.03060, ICLR 2026")
@dataclass(frozen=True)
class IvcPrune(Pruner):
    """Keep tokens that encode coordinates or match the question (IVC-Prune).

    Coordinate tokens are the tokens with the largest mean cosine, and the largest mean sine, of their rotary angles.
    The rest is scored by value similarity: first the text after the image rates all tokens and selects a few seeds;
    then text and seeds together rate the rest. The first two text tokens after an image only close the image in the
    prompt, so they do not rate unless the text has no other tokens.

    Args:
        layer: First decoder layer that runs on the kept tokens. The layer before it provides the values. None: half of
            the decoder's layers.
        coordinates: Share of an image's tokens kept for their cosine, and again for their sine, in [0, 0.5]. Each is at
            most a quarter of the budget.

    Source:
        "IVC-Prune: Revealing the Implicit Visual Coordinates in LVLMs for Vision Token Pruning" (arXiv 2602.03060), its
        summary and the authors' code: softmax of the scaled products of value vectors, per head, without a causal mask,
        averaged over heads.

    Differences from the paper:
        - `keep` is exact: coordinates first, then seeds, then the best of the rest. The code for LLaVA keeps a union.
        - The softmax covers the image and the text after it. The code uses the whole prompt for LLaVA and only the
          image for Qwen-VL.
        - With M-RoPE, a channel uses the angle of its own axis. The code averages the three axes.
        - Layers before the cut keep their keys and values. The code drops them.
        - Each image has its own budget.

    Example:
        >>> model = tokenprune.patch(model, IvcPrune(layer=3), keep=0.25)
        >>> output = model(**inputs)
        >>> tokenprune.stats(model).visual_tokens_out
        64
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
        seed_index = partition(seed)[:, : max(seeds)]  # seeds first
        own = gather_tokens(values, seed_index, 1)
        from_seeds = _likeness(own, seed.gather(1, seed_index), values, there)[..., : mask.shape[1]].sum(1)
        score = (rated + from_seeds) / (raters.sum(1) + seed.sum(1))[:, None]

        first = torch.where(anchors, 2, torch.where(seed, 1, 0))
        # Sort by rank, then by score. Scores are averages of softmax outputs, so they are at most 1.
        return Selection.top(first * 2 + score.nan_to_num(nan=-1.0).clamp(-1, 1), tokens)


def _likeness(of: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the softmax similarity of value vectors, averaged over heads, shape (segments, queries, tokens), float32.

    Args:
        of: Value vectors of the queries, shape (segments, queries, heads, head size).
        rows: Mask of valid queries, shape (segments, queries). Other rows are 0.
        values: Value vectors of all tokens, shape (segments, tokens, heads, head size).
        there: Mask of valid tokens, shape (segments, tokens).
    """
    found = []
    for one, row in zip(of.float().split(256, dim=1), rows.split(256, dim=1), strict=True):
        product = torch.einsum("srhd,sthd->shrt", one, values) / values.shape[-1] ** 0.5
        share = product.masked_fill(~there[:, None, None, :], -torch.inf).softmax(-1).mean(1)
        found.append(share.masked_fill(~row[:, :, None], 0))
    return torch.cat(found, dim=1)
