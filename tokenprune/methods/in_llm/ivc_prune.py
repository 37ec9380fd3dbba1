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

_SEED_SHARE = 0.01  # seeds, as a share of an image's tokens
_SKIPPED_TEXT = 2  # text tokens after an image that only close the image in the prompt


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

    Examples:
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
        cos, sin = (angles.float().mean(-1) for angles in tokens.rotation)
        anchor_counts = [
            min(round(self.coordinates * count), kept // 4) for count, kept in zip(tokens.counts, keep, strict=True)
        ]
        num_anchors, max_anchors = to_device(anchor_counts, device), max(anchor_counts)
        anchors = top_mask(cos, mask, num_anchors, max_anchors) | top_mask(sin, mask, num_anchors, max_anchors)

        text = tokens.text.mask
        valid = torch.cat([mask, text], dim=1)
        values = torch.cat([tokens.value_heads, tokens.text.value_heads], dim=1).float()
        values = values.masked_fill(~valid[:, :, None, None], 0)
        text_index = text.cumsum(1)
        raters = text & ((text_index > _SKIPPED_TEXT) | (text_index[:, -1:] <= _SKIPPED_TEXT))
        text_similarity = _compute_similarity(tokens.text.value_heads, raters, values, valid)
        text_similarity = text_similarity[..., : mask.shape[1]].sum(1)
        seeds = [max(1, round(_SEED_SHARE * count)) for count in tokens.counts]
        seed = top_mask(text_similarity, mask, to_device(seeds, device), max(seeds))
        seed_index = partition(seed)[:, : max(seeds)]  # seeds first
        seed_values = gather_tokens(values, seed_index, 1)
        seed_similarity = _compute_similarity(seed_values, seed.gather(1, seed_index), values, valid)
        seed_similarity = seed_similarity[..., : mask.shape[1]].sum(1)
        score = (text_similarity + seed_similarity) / (raters.sum(1) + seed.sum(1))[:, None]

        rank = torch.where(anchors, 2, torch.where(seed, 1, 0))
        # Sort by rank, then by score. Scores are averages of softmax outputs, so they are at most 1.
        return Selection.top(rank * 2 + score.nan_to_num(nan=-1.0).clamp(-1, 1), tokens)


def _compute_similarity(
    queries: torch.Tensor, query_mask: torch.Tensor, values: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Return the softmax similarity of value vectors, averaged over heads, shape (segments, queries, tokens), float32.

    Args:
        queries: Value vectors of the queries, shape (segments, queries, heads, head size).
        query_mask: Mask of valid queries, shape (segments, queries). Other rows are 0.
        values: Value vectors of all tokens, shape (segments, tokens, heads, head size).
        valid: Mask of valid tokens, shape (segments, tokens).
    """
    parts = []
    for query_part, mask_part in zip(queries.float().split(256, dim=1), query_mask.split(256, dim=1), strict=True):
        product = torch.einsum("srhd,sthd->shrt", query_part, values) / values.shape[-1] ** 0.5
        share = product.masked_fill(~valid[:, None, None, :], -torch.inf).softmax(-1).mean(1)
        parts.append(share.masked_fill(~mask_part[:, :, None], 0))
    return torch.cat(parts, dim=1)
