# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from tokenprune.kernels.clusters import assign_to_centres, find_density_peaks
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.masses import uniform_weights
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.multi_cut import TEXT_ATTENTION, SharedBudgetCuts, sum_text_attention
from tokenprune.methods.registry import register
from tokenprune.selection.method import Selection, Site
from tokenprune.selection.tokens import VisualTokens

_TOKENS_PER_CLUSTER = 10  # recycled tokens per cluster


@register("sparsevlm", site=Site.IN_LLM, paper="arXiv 2410.04417, ICML 2025", merges=True)
@dataclass(frozen=True)
class SparseVLM(SharedBudgetCuts):
    """Keep tokens that relevant words attend to and merge some others (SparseVLM).

    The rating words are chosen once, from the embeddings that enter the decoder: words with an above-average similarity
    to the visual tokens. Three cuts rank the visual tokens by the mean attention from these words. Version "1" merges
    the best of the dropped tokens into a few clusters. If no word is above average, all words rate. Images without
    following text are scored by the prompt's last token.

    `keep` is the average number of tokens over the decoder's layers. The default 0.36 is about the paper's "192 tokens"
    of 576.

    Args:
        layers: Decoder layers of the three cuts. None: layers 3, 7 and 16 of 32, scaled to the depth of the decoder.
        version: "1" merges (v1.5 of the authors' code). "+" drops, divides attention by the effect of the distance, and
            uses only the heads with the most attention to the image (SparseVLM+).
        recycle: Share of the removed tokens that is merged, in [0, 1], into a tenth as many clusters. For version "1".
        heads: Number of heads that rate. For version "+".
        exact: Count merged tokens as part of `keep`. False adds them on top, as the authors do.

    Source:
        Zhang et al., "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference" (arXiv
        2410.04417), sections 3.2 to 3.4, and the authors' code for both versions. "After layers 2, 6 and 15" in the
        paper is the input of layers 3, 7 and 16 here.

    Differences from the paper:
        - Counts follow `keep` in the ratio 300 : 200 : 110 of v1.5, instead of the rank of the attention matrix (v1.0).
        - A merged token takes the position of its cluster's centre. The authors append merged tokens to the kept ones.
        - Kept tokens keep their positions, also in version "1".
        - Ties in density go to the earlier token. The authors break them with random noise.
        - Version "+" uses the same rating words as version "1".

    Examples:
        >>> model = tokenprune.patch(model, SparseVLM(version="+", heads=4), keep=0.5)
        >>> output = model(**inputs)
        >>> len(tokenprune.stats(model).removals)
        3
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

    def resolve_count(self, count: int, keep: int) -> int:
        return keep if self.exact else min(count, keep + self._count_clusters(count, keep))

    def select(self, tokens: VisualTokens) -> Selection:
        score = self._score(tokens)
        counts = zip(tokens.counts, tokens.keep, strict=True)
        clusters = [self._count_kept_clusters(count, keep) for count, keep in counts]
        if not any(clusters):
            return Selection.top(score, tokens)
        num_clusters = to_device(clusters, score.device)
        picks = top_mask(score, tokens.mask, tokens.budget - num_clusters, max(tokens.keep))
        num_recycled = [
            self._count_recycled(count - keep + clusters_kept) if clusters_kept else 0
            for count, keep, clusters_kept in zip(tokens.counts, tokens.keep, clusters, strict=True)
        ]
        recycled = top_mask(score, tokens.mask & ~picks, to_device(num_recycled, score.device), max(num_recycled))
        index = partition(recycled)[:, : max(num_recycled)]
        x, mask, max_clusters = gather_tokens(tokens.hidden, index, 1), recycled.gather(1, index), max(clusters)
        centres = find_density_peaks(x, mask, num_clusters, max_clusters, neighbours=max_clusters)
        centre = assign_to_centres(x, mask, centres, max_clusters)
        token_index = torch.arange(score.shape[1], device=score.device)
        # Padding entries of `index` are dropped tokens. They keep the assignment -1.
        target = index.gather(1, centre.clamp(min=0)).masked_fill(~mask, -1)
        merged = torch.full_like(picks, -1, dtype=torch.long).scatter_(1, index, target)
        assignment = torch.where(picks, token_index, merged)
        keep = picks | (recycled & (assignment == token_index))
        return Selection(keep, assignment, counts=tokens.keep)

    def _count_recycled(self, removed: int) -> int:
        return min(removed, int(self.recycle * removed) + 1)

    def _count_clusters(self, count: int, picks: int) -> int:
        """Return the number of clusters of a cut that keeps `picks` of `count` tokens unmerged."""
        if self.version != "1" or not self.recycle or picks >= count:
            return 0
        return int(self._count_recycled(count - picks) / _TOKENS_PER_CLUSTER) + 1

    def _count_kept_clusters(self, count: int, keep: int) -> int:
        """Return the number of clusters among the `keep` tokens that a cut keeps."""
        if keep >= count or not self._count_clusters(count, keep):
            return 0
        num_clusters = self._count_clusters(count, keep)
        while self._count_clusters(count, keep - num_clusters) > num_clusters:
            num_clusters += 1
        return min(num_clusters, keep - 1)

    def _score(self, tokens: VisualTokens) -> torch.Tensor:
        weights = self._get_word_weights(tokens)
        if self.version == "1":
            return sum_text_attention(tokens, weights).mean(1)
        has_text = tokens.text.mask.any(1)[:, None, None]
        corrected = tokens.text_attention / _compute_position_effect(tokens)[:, None]
        votes = torch.where(has_text, (corrected * weights[:, None, :, None]).sum(2), tokens.last_row_attention)
        mass = votes.masked_fill(~tokens.mask[:, None], 0).sum(2)  # [S, H]
        chosen = top_mask(mass, torch.ones_like(mass, dtype=torch.bool), mass.new_full((len(mass),), self.heads).long(),
                          self.heads)  # fmt: skip
        return votes.masked_fill(~chosen[:, :, None], 0).sum(1) / chosen.sum(1, keepdim=True)

    def _get_word_weights(self, tokens: VisualTokens) -> torch.Tensor:
        """Return equal weights of the rating words, shape (segments, words), float32. Computed at the first cut."""
        if "weights" not in tokens.carry:
            visual, text, text_mask = tokens.embeddings.float(), tokens.text.embeddings.float(), tokens.text.mask
            similarity = (visual @ text.transpose(1, 2)).masked_fill(~text_mask[:, None], -torch.inf).softmax(2)
            similarity = similarity.masked_fill(~tokens.mask[:, :, None], 0).sum(1) / tokens.mask.sum(1, keepdim=True)
            similarity = similarity.nan_to_num(nan=0.0)
            mean = similarity.sum(1, keepdim=True) / text_mask.sum(1, keepdim=True).clamp(min=1)
            above = text_mask & (similarity > mean)
            raters = torch.where(above.any(1, keepdim=True), above, text_mask)
            tokens.remember("weights", uniform_weights(raters), per_token=False)
        return tokens.carry["weights"]


def _compute_position_effect(tokens: VisualTokens) -> torch.Tensor:
    """Return the effect of rotary positions on text-to-visual attention, (segments, words, tokens), float32, never 0.

    It is the scaled product of two rotated vectors of ones.
    """
    (cos, sin), (text_cos, text_sin) = tokens.rotation, tokens.text.rotation
    product = text_cos.float() @ cos.float().transpose(1, 2) + text_sin.float() @ sin.float().transpose(1, 2)
    product = product / cos.shape[-1] ** 0.5
    return torch.where(product < 0, product.clamp(max=-1e-6), product.clamp(min=1e-6))
