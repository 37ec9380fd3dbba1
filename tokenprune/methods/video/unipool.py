# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import plan_cuts
from tokenprune.kernels.clusters import assign_to_centres, find_density_peaks
from tokenprune.kernels.coverage import cosine_products
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.suppress import non_maximum_suppression
from tokenprune.kernels.take import adjust_count
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.scores import rescale
from tokenprune.methods.video.merging import VideoMerger, flat_indices, get_tower_attention, merge_dropped
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_NEIGHBOURS = 5  # nearest neighbours in the density of a token, including the token


@register(
    "unipool",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2603.21957, CVPR 2026 (notes of others)",
    merges=True,
    reconstruction=True,
)
@dataclass(frozen=True)
class UniPool(VideoMerger):
    """Pool salient and diverse tokens of a video and cluster the rest (Unified Compression).

    Tokens are visited by descending attention in the vision tower. A token enters the pool if its cosine to every
    pooled token is below `threshold`. The other tokens are clustered around density peaks, and each cluster becomes its
    mean at its centre. Inside the decoder a second cut keeps the tokens that the text after the video attends to or
    resembles most; every other token joins the most similar kept token.

    `keep` is the average number of tokens over the decoder's layers, including the second cut.

    Args:
        threshold: Cosine in [-1, 2] from which a token is rejected from the pool. Above 1, no token is rejected.
        clusters: Share of the first cut's tokens that are clusters. The others are the pool.
        inner: Share of the decoder's layers before the second cut. False skips the second cut, so that the selection
            does not depend on the question; `keep` is then the first cut.
        inner_keep: Share of the tokens that the second cut keeps.
        balance: Weight of the text's attention, in [0, 1], against the cosine to its hidden states. Both are the
            maximum over text tokens, rescaled to [0, 1] per video.

    Source:
        Du et al., "Unified Spatiotemporal Token Compression for Video-LLMs at Ultra-Low Retention" (arXiv 2603.21957).
        Reconstruction: the paper's text was not available and no code is public; it follows notes by others.

    Differences from the paper:
        - `keep` is an average over the layers. In the paper it counts the tokens that enter the decoder.
        - The pool grows by one token at a time. If it cannot be filled, rejected tokens with the most attention are
          added.
        - Densities use five neighbours.
        - The number of clusters is rounded half up.
        - The text is the text after the video, or the prompt's last token if there is none.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, UniPool(inner=False), keep=0.25)
    """

    syncs_device: ClassVar[bool] = True  # if the table of all pairs does not fit into memory
    query_free: ClassVar[Mapping[str, Any]] = {"inner": False}

    threshold: Annotated[float, Ge(-1), Le(2)] = 0.7
    clusters: Annotated[float, Ge(0), Le(1)] = 0.3
    inner: Annotated[float, Gt(0), Lt(1)] | Literal[False] = 18 / 28
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.5
    balance: Annotated[float, Ge(0), Le(1)] = 0.5

    @property
    def query_aware(self) -> bool:
        return self.inner is not False

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        first = dataclasses.replace(self, inner=False)
        if self.inner is False:
            return [(first, budget)]
        early, late = plan_cuts(layers, ((0, 1.0), (float(self.inner), self.inner_keep)), budget)
        return [(first, early.budget), (_InnerUniPool(late.layer, self.balance), late.budget)]

    def merge(self, videos: Videos) -> tuple[torch.Tensor, None]:
        x, mask, attention = (
            tensor.flatten(1, 2) for tensor in (videos.hidden, videos.mask, get_tower_attention(videos))
        )
        num_clusters = [int(self.clusters * keep + 0.5) for keep in videos.keep]
        clusters = to_device(num_clusters, mask.device)

        is_near = Relation(cosine_products(x, mask), lambda cosine: cosine >= self.threshold)
        pool = non_maximum_suppression(is_near, attention, mask)
        pool = adjust_count(pool, attention, mask, videos.budget - clusters)

        rest, max_clusters = mask & ~pool, max(1, *num_clusters)
        centres = find_density_peaks(x, rest, clusters, max_clusters, _NEIGHBOURS, capped=False)
        target = assign_to_centres(x, rest, centres, max_clusters).view_as(videos.mask)
        return torch.where(pool.view_as(target), flat_indices(target), target), None


@dataclass(frozen=True)
class _InnerUniPool(Pruner):
    """Second cut: keep tokens that the text attends to or resembles, and merge the others into them.

    Args:
        layer: Decoder layer of the cut.
        balance: See `UniPool`.
    """

    layer: int
    balance: float

    query_aware: ClassVar[bool] = True
    name: ClassVar[str] = "unipool"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"text_sum_and_max", "last_row_attention"})
    merges: ClassVar[bool] = True

    def select(self, tokens: VisualTokens) -> Selection:
        text = tokens.text
        attention, cosine = tokens.last_row_attention.mean(1), torch.zeros_like(tokens.mask, dtype=torch.float32)
        if text.mask.shape[1]:
            has_text = text.mask.any(1, keepdim=True)
            attention = torch.where(has_text, tokens.text_sum_and_max[:, 1], attention)
            cosine = torch.where(has_text, best_match(tokens.hidden, text.hidden, text.mask)[0], cosine)
        score = self.balance * rescale(attention.nan_to_num(nan=0.0), tokens.mask)
        score = score + (1 - self.balance) * rescale(cosine, tokens.mask)
        return merge_dropped(Selection.top(score, tokens), tokens)
