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
    """Spend half of the budget as another method would, and merge all that this drops into distinctive anchors; if
    asked to, weigh attention in the language model by how many tokens each stands for (RESTORE).

    Among the tokens that the other method drops, anchors are those that many resemble (r, the sum of cosines), and
    that resemble no rival (d, the largest cosine to one): the largest r (1 - d). Every other joins the anchor that it
    resembles most. A group becomes its mean, at the place of its lower median token.

    chooser: name of the method that spends the first half, one between tower and language model that neither merges nor
    finds the count itself; with its options as they are by default.
    merged: share of the budget that is anchors; 0: only the weighing.
    rival: "weaker", tokens of smaller r, as the authors' code has it, or "stronger", as their text is quoted.
    calibrate: add log s + log(2 - D) to the attention logits of the language model, where s is how many tokens the key
    stands for and D, from 1 on downwards, the mean over the rotary frequencies of the cosine of distance times
    frequency; in the first layer s is the same for all tokens of an image. On a cache, log s alone. Takes sdpa or eager
    attention in all layers, and a dynamic cache.

    Source: Cho et al., "Improving Visual Token Reduction via Rectifying Distortions for Efficient Multimodal LLM
    Inference", by two notes on it and a description of its code. Its text was not read.

    Differs from the paper: positions of what stays are the original ones with and without it, so that its gain is
    smaller here; `calibrate` is off by default, since flash attention, static caches and vLLM have no place for it; at
    least one token is the chooser's; D is taken of the rotary tables that the model has, along each token's own axis
    with M-RoPE, and in float32.
    """

    fallback_options: ClassVar[Mapping[str, Any]] = {"calibrate": False}

    chooser: str = "divprune"
    merged: Annotated[float, Ge(0), Lt(1)] = 0.5
    rival: Literal["weaker", "stronger"] = "weaker"
    calibrate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one = self._chooser
        plain = isinstance(one, Pruner) and one.site is Site.PRE_LLM and not one.merges and not one.chooses_count
        self._check(
            plain and one.min_tokens > 0,
            f"chooser={self.chooser!r} does not keep a set number of tokens, as they are, between vision tower and "
            "language model; take divprune, vispruner or cdpruner",
        )

    @cached_property
    def _chooser(self) -> Pruner:
        found: Any = build(self.chooser, {})
        return found

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
        both = zip(tokens.keep, tokens.counts, strict=True)
        plain = [keep if keep >= count else max(1, int((1 - self.merged) * keep)) for keep, count in both]
        anchors = [keep - own for keep, own in zip(tokens.keep, plain, strict=True)]
        chosen = self._chooser.select(replace(tokens, keep=plain)).keep & tokens.mask
        index = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
        group = index.masked_fill(~chosen, -1)
        if any(anchors):
            group = self._groups(tokens.hidden, tokens.mask & ~chosen, anchors, group)
        return self._selection(tokens, group, index)

    def _groups(self, x: torch.Tensor, left: torch.Tensor, number: list[int], group: torch.Tensor) -> torch.Tensor:
        """Return `group`, long `[S, N]` (a token that stays as it is has its own index, others -1), with the anchor of
        each token of `left`, bool `[S, N]`. number: of anchors in each segment."""
        products = cosine_products(x, left)
        near = products.reduce_rows(lambda rows, segment, start: rows.sum(1))

        def closest(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
            own, others = near[segment, start : start + len(rows), None], near[segment]
            rivals = left[segment] & (others < own if self.rival == "weaker" else others > own)
            found = rows.masked_fill(~rivals, -torch.inf).amax(1)
            return found.masked_fill(found == -torch.inf, 0)

        score = near * (1 - products.reduce_rows(closest))
        anchors = top_mask(score, left, to_device(number, x.device), max(number))

        def most_alike(rows: torch.Tensor, segment: int, start: int) -> torch.Tensor:
            return rows.masked_fill(~anchors[segment], -torch.inf).argmax(1)

        joined = products.reduce_rows(most_alike)
        index = torch.arange(left.shape[1], device=x.device)
        joined = torch.where(anchors, index, joined).masked_fill(~anchors.any(1, keepdim=True), -1)
        return torch.where(left, joined, group)

    def _selection(self, tokens: VisualTokens, group: torch.Tensor, index: torch.Tensor) -> Selection:
        """Return the choice of one token for each group, its lower median, and remember how many each stands for."""
        count, real = group.shape[1], group >= 0
        slot = group.masked_fill(~real, count)  # a scratch entry at the end
        size = slot.new_zeros(len(slot), count + 1).scatter_add(1, slot, torch.ones_like(slot)).gather(1, slot)
        keep = real & (rank_in_group(slot, -index) == (size - 1) // 2)
        centre = slot.new_zeros(len(slot), count + 1).scatter(1, slot.masked_fill(~keep, count), index)
        tokens.remember(SIZES, size.float(), per_token=True)
        return Selection(keep, centre.gather(1, slot).masked_fill(~real, -1), counts=tokens.keep)
