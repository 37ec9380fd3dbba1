# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Lt

from tokenprune.kernels.coverage import cosine_products
from tokenprune.kernels.take import rank_in_group, top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import build, register
from tokenprune.selection.method import SIZES, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens


@register("restore", site=Site.PRE_LLM, paper="arXiv 2606.01711, ICML 2026 (notes of others and its code)", merges=True)
@dataclass(frozen=True)
class Restore(Pruner):
    """Merge the tokens that another method drops into distinct anchors.

    The other method spends half of the budget, and anchors spend the other half. Anchors are the dropped tokens
    with the largest r (1 - d), where r is the sum of a token's cosines and d its largest cosine to a rival. Every other
    dropped token joins its most similar anchor. Each group becomes its mean at the index of its lower median token.
    Optionally, attention in the language model is weighted by the number of tokens that a key represents.

    Args:
        chooser: Name of the method that spends the first half, with default options. It must act between tower and
            language model, keep a fixed number of tokens and not merge.
        merged: Share of the budget for anchors, in [0, 1). 0 only calibrates attention.
        rival: Rivals of an anchor are the tokens with smaller r ("weaker", as in the authors' code) or larger r
            ("stronger", as quoted from the paper).
        calibrate: Add log s + log(2 - D) to the attention logits of the language model. s is the number of tokens that
            a key represents, and D is the mean over rotary frequencies of cos(distance * frequency). The first layer
            uses the same s for all tokens of an image. On a cache, only log s is added. Requires sdpa or eager
            attention in all layers and a dynamic cache.

    Source:
        Cho et al., "Improving Visual Token Reduction via Rectifying Distortions for Efficient Multimodal LLM Inference"
        (arXiv 2606.01711), from two notes and a description of the code. The text of the paper was not read.

    Differences from the paper:
        - Kept tokens always keep their positions in the prompt, so the gain over the other method is smaller.
        - `calibrate` is off by default, because flash attention, static caches and vLLM do not support it.
        - The other method keeps at least one token.
        - D uses the model's rotary tables in float32, along each token's own axis with M-RoPE.

    Examples:
        >>> model = tokenprune.patch(model, Restore(chooser="vispruner"), keep=64)
        >>> output = model.generate(**inputs, max_new_tokens=1)
        >>> tokenprune.stats(model).visual_tokens_out
        64
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"calibrate": False}

    chooser: str = "divprune"
    merged: Annotated[float, Ge(0), Lt(1)] = 0.5
    rival: Literal["weaker", "stronger"] = "weaker"
    calibrate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        chooser = self._chooser
        is_supported = (
            isinstance(chooser, Pruner)
            and chooser.site is Site.PRE_LLM
            and not chooser.merges
            and not chooser.chooses_count
        )
        self._check(
            is_supported and chooser.min_tokens > 0,
            f"chooser={self.chooser!r} must keep a fixed number of unmerged tokens between tower and language model. "
            "Use divprune, vispruner or cdpruner.",
        )

    @cached_property
    def _chooser(self) -> Pruner:
        method: Any = build(self.chooser, {})
        return method

    @property
    def needs(self) -> frozenset[str]:
        return self._chooser.needs

    @property
    def encoder_layers(self) -> tuple[int | float, ...]:
        return self._chooser.encoder_layers

    @property
    def query_aware(self) -> bool:
        return self._chooser.query_aware

    @property
    def weighs_attention(self) -> bool:
        return self.calibrate

    def select(self, tokens: VisualTokens) -> Selection:
        counts = zip(tokens.keep, tokens.counts, strict=True)
        chooser_keeps = [keep if keep >= count else max(1, int((1 - self.merged) * keep)) for keep, count in counts]
        num_anchors = [keep - chooser_keep for keep, chooser_keep in zip(tokens.keep, chooser_keeps, strict=True)]
        chosen = self._chooser.select(replace(tokens, keep=chooser_keeps)).keep & tokens.mask
        index = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
        group = index.masked_fill(~chosen, -1)
        if any(num_anchors):
            group = self._assign_anchors(tokens.hidden, tokens.mask & ~chosen, num_anchors, group)
        return self._select_medians(tokens, group, index)

    def _assign_anchors(
        self, x: torch.Tensor, candidates: torch.Tensor, num_anchors: list[int], group: torch.Tensor
    ) -> torch.Tensor:
        """Pick anchors among the candidates and assign each candidate to its most similar anchor.

        Args:
            x: Tokens, (S, N, D).
            candidates: Tokens that the chooser dropped, bool (S, N).
            num_anchors: Number of anchors of each segment.
            group: Group of each token, long (S, N): its own index if the chooser keeps it, otherwise -1.

        Returns:
            `group` with the anchor index of each candidate, long (S, N).
        """
        products = cosine_products(x, candidates)
        total_similarity = products.reduce_rows(lambda rows, segment, start: rows.sum(1))

        def find_rival(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
            row_totals, totals = total_similarity[segment, start : start + len(rows), None], total_similarity[segment]
            is_rival = totals < row_totals if self.rival == "weaker" else totals > row_totals
            rivals = candidates[segment] & is_rival
            rival_similarity = rows.masked_fill(~rivals, -torch.inf).amax(1)
            return rival_similarity.masked_fill(rival_similarity == -torch.inf, 0)

        score = total_similarity * (1 - products.reduce_rows(find_rival))
        anchors = top_mask(score, candidates, to_device(num_anchors, x.device), max(num_anchors))

        def find_anchor(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
            return rows.masked_fill(~anchors[segment], -torch.inf).argmax(1)

        assigned = products.reduce_rows(find_anchor)
        index = torch.arange(candidates.shape[1], device=x.device)
        assigned = torch.where(anchors, index, assigned).masked_fill(~anchors.any(1, keepdim=True), -1)
        return torch.where(candidates, assigned, group)

    def _select_medians(self, tokens: VisualTokens, group: torch.Tensor, index: torch.Tensor) -> Selection:
        """Keep the lower median token of each group, and remember the group sizes for calibration."""
        count, is_member = group.shape[1], group >= 0
        slot = group.masked_fill(~is_member, count)  # the last entry is unused
        size = slot.new_zeros(len(slot), count + 1).scatter_add(1, slot, torch.ones_like(slot)).gather(1, slot)
        keep = is_member & (rank_in_group(slot, -index) == (size - 1) // 2)
        median = slot.new_zeros(len(slot), count + 1).scatter(1, slot.masked_fill(~keep, count), index)
        tokens.remember(SIZES, size.float(), per_token=True)
        return Selection(keep, median.gather(1, slot).masked_fill(~is_member, -1), counts=tokens.keep)
