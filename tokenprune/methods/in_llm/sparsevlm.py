# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import nearest, peaks
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.masses import evenly
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, SharedBudgetCuts, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Selection, Site
from tokenprune.selection.tokens import VisualTokens

_A_CLUSTER = 10  # recycled tokens for each cluster


@register("sparsevlm", site=Site.IN_LLM, paper="arXiv 2410.04417, ICML 2025", merges=True)
@dataclass(frozen=True)
class SparseVLM(SharedBudgetCuts):
    """Keep the visual tokens that those words of the question attend to which the image brings up, and merge the best
    of the others into a few.

    Words that rate are found once, from what enters the decoder: those that visual tokens are more alike to than on
    average. Three cuts rank visual tokens by the mean attention of these words.

    keep: tokens averaged over the decoder's layers; 0.36 (default) is about the paper's "192 tokens" of 576.
    layers: three decoder layers at whose input the cuts are made; None: 3, 7 and 16 of 32, in proportion.
    version: "1" merges (v1.5 of the authors' code); "+" drops, divides attention by how the distance alone weighs it,
    and asks the `heads` that attend to the image most (SparseVLM+).
    recycle: share in [0, 1] of what a cut removes that is merged, a tenth as many clusters; for version "1".
    heads: int >= 1, how many heads rate; for version "+".
    exact: True counts merged tokens within `keep`. False keeps the authors' count, the merged ones on top.

    Source: Zhang et al., "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference",
    sections 3.2 to 3.4, and the authors' code for both versions. "After layers 2, 6 and 15" there is at the input of 3,
    7 and 16 here.

    Differs from the paper: counts follow `keep` by the profile of the 192 tokens of v1.5, 300 : 200 : 110, and not the
    rank of the attention matrix (v1.0); a cut that keeps all drops nothing. A merged token stands where its cluster's
    centre stood, and has its place in the order (there after the kept ones); all kept tokens keep their positions,
    also in version "1". Of equally dense tokens the first is denser (there random noise decides). The words of "+" are
    those of "1". Where no word stands out all rate; where none is after an image, the prompt's last token does.
    """

    query_aware: ClassVar[bool] = True
    default_keep: ClassVar[float] = 0.36
    depths = (3 / 32, 7 / 32, 16 / 32)
    sizes = (300.0, 200.0, 110.0)

    version: Literal["1", "+"] = "1"
    recycle: Annotated[float, Ge(0), Le(1)] = 0.3
    heads: Annotated[int, Ge(1)] = 14
    exact: bool = True

    @property
    def needs(self) -> frozenset[str]:
        return TEXT_ATTENTION | ({"embeddings"} if self.version == "1" else {"embeddings", "rotation"})

    def budget(self, count: int, keep: int) -> int:
        return keep if self.exact else min(count, keep + self._merged(count, keep))

    def select(self, tokens: VisualTokens) -> Selection:
        score = self._score(tokens)
        clusters = [self._clusters(count, keep) for count, keep in zip(tokens.counts, tokens.keep, strict=True)]
        if not any(clusters):
            return Selection.top(score, tokens)
        numbers = to_device(clusters, score.device)
        picks = top_mask(score, tokens.mask, tokens.budget - numbers, max(tokens.keep))
        of = zip(tokens.counts, tokens.keep, clusters, strict=True)
        again = [self._recycled(count - keep + number) if number else 0 for count, keep, number in of]
        recycled = top_mask(score, tokens.mask & ~picks, to_device(again, score.device), max(again))
        place = partition(recycled)[:, : max(again)]
        x, mask, most = gather_tokens(tokens.hidden, place, 1), recycled.gather(1, place), max(clusters)
        centres = peaks(x, mask, numbers, most, neighbours=most)
        into = nearest(x, mask, centres, most)
        index = torch.arange(score.shape[1], device=score.device)
        # Other entries of `place` are dropped tokens, which are assigned to nothing.
        target = place.gather(1, into.clamp(min=0)).masked_fill(~mask, -1)
        assign = torch.where(picks, index, torch.full_like(picks, -1, dtype=torch.long).scatter_(1, place, target))
        keep = picks | (recycled & (assign == index))
        return Selection(keep, assign, counts=tokens.keep)

    def _recycled(self, removed: int) -> int:
        return min(removed, int(self.recycle * removed) + 1)

    def _merged(self, count: int, picks: int) -> int:
        """Return the number of clusters of a cut that picks so many of `count` tokens."""
        if self.version != "1" or not self.recycle or picks >= count:
            return 0
        return int(self._recycled(count - picks) / _A_CLUSTER) + 1

    def _clusters(self, count: int, keep: int) -> int:
        """Return the number of clusters among the `keep` tokens that a cut leaves."""
        if keep >= count or not self._merged(count, keep):
            return 0
        number = self._merged(count, keep)
        while self._merged(count, keep - number) > number:
            number += 1
        return min(number, keep - 1)

    def _score(self, tokens: VisualTokens) -> torch.Tensor:
        raters = self._raters(tokens)
        weights = evenly(raters)
        if self.version == "1":
            return sum_text_attention(tokens, weights).mean(1)
        there = tokens.text.mask.any(1)[:, None, None]
        corrected = tokens.text_attention / _by_distance(tokens)[:, None]
        votes = torch.where(there, (corrected * weights[:, None, :, None]).sum(2), tokens.last_row_attention)
        mass = votes.masked_fill(~tokens.mask[:, None], 0).sum(2)  # [S, H]
        chosen = top_mask(mass, torch.ones_like(mass, dtype=torch.bool), mass.new_full((len(mass),), self.heads).long(),
                          self.heads)  # fmt: skip
        return votes.masked_fill(~chosen[:, :, None], 0).sum(1) / chosen.sum(1, keepdim=True)

    def _raters(self, tokens: VisualTokens) -> torch.Tensor:
        """bool `[S, M]`: the words that rate, found at the first cut."""
        if "raters" not in tokens.carry:
            visual, text, there = tokens.embeddings.float(), tokens.text.embeddings.float(), tokens.text.mask
            alike = (visual @ text.transpose(1, 2)).masked_fill(~there[:, None], -torch.inf).softmax(2)
            alike = alike.masked_fill(~tokens.mask[:, :, None], 0).sum(1) / tokens.mask.sum(1, keepdim=True)
            alike = alike.nan_to_num(nan=0.0)
            mean = alike.sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)
            above = there & (alike > mean)
            tokens.remember("raters", torch.where(above.any(1, keepdim=True), above, there), per_token=False)
        return tokens.carry["raters"]


def _by_distance(tokens: VisualTokens) -> torch.Tensor:
    """float32 `[S, M, N]`: what rotary positions alone make of each pair of text and visual token: the product of two
    rotated vectors of ones, over the root of their width. Never 0."""
    (cos, sin), (text_cos, text_sin) = tokens.rotation, tokens.text.rotation
    product = text_cos.float() @ cos.float().transpose(1, 2) + text_sin.float() @ sin.float().transpose(1, 2)
    product = product / cos.shape[-1] ** 0.5
    return torch.where(product < 0, product.clamp(max=-1e-6), product.clamp(min=1e-6))
