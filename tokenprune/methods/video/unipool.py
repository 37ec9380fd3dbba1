# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import profile
from tokenprune.kernels.clusters import nearest, peaks
from tokenprune.kernels.coverage import alike
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairs import Relation
from tokenprune.kernels.suppress import unsuppressed
from tokenprune.kernels.take import settle
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.scores import rescale
from tokenprune.methods.video.merging import VideoMerger, flat_indices, get_tower_attention, merge_dropped
from tokenprune.selection.method import Method, Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_NEIGHBOURS = 5  # of a token that tell how dense it is there, itself among them


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
    """Pool, over all frames of a video at once, what the vision tower attends to and nothing in the pool resembles;
    cluster the rest; and merge again inside the decoder, by the question (Unified Spatiotemporal Token Compression).

    All tokens are visited by falling attention in the vision tower, and one enters the pool if no token of the pool has
    a cosine of `threshold` or more to it. What is not in the pool, refused or never reached, is clustered around peaks
    of density, and a cluster becomes its mean, at its centre. Inside the decoder those stay that the text after the
    video attends to or resembles most, and each other token joins the most similar one of these.

    keep: tokens averaged over the decoder's layers, the second cut included.
    threshold: cosine in [-1, 2] from which on a token is refused; above 1 none is.
    clusters: share of the first cut's tokens that are clusters; the others are the pool.
    inner: share of the decoder's layers before the second cut. False leaves it out: the choice then knows nothing of
    the question, and `keep` is the first cut.
    inner_keep: share of the tokens that the second cut keeps.
    balance: weight in [0, 1] of the text's attention in the layer before, the most of any of its tokens; the rest is
    that of the largest cosine to a text token's hidden state. Both are stretched from 0 to 1 over a video.

    Source: Du et al., "Unified Spatiotemporal Token Compression for Video-LLMs at Ultra-Low Retention", by notes of
    others.

    Differs from the paper: its text was not read and no code is public, so this is a reconstruction. Ours are: the walk
    takes one token at a time; where it ends before the pool is full, the refused ones with most attention come back;
    densities count five neighbours; the share of clusters is rounded half up; and the text is that after the video, the
    prompt's last token where there is none. `keep` is an average over the layers (there what enters the decoder).
    """

    asks_device: ClassVar[bool] = True  # where the table of all pairs does not fit
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
        early, late = profile(layers, ((0, 1.0), (float(self.inner), self.inner_keep)), budget)
        return [(first, early.budget), (_InnerUniPool(late.layer, self.balance), late.budget)]

    def merge(self, videos: Videos) -> tuple[torch.Tensor, None]:
        x, mask, attention = (one.flatten(1, 2) for one in (videos.x, videos.mask, get_tower_attention(videos)))
        numbers = [int(self.clusters * keep + 0.5) for keep in videos.keep]
        clusters = to_device(numbers, mask.device)

        near = Relation(alike(x, mask), lambda cosine: cosine >= self.threshold)
        pool = settle(unsuppressed(near, attention, mask), attention, mask, videos.budget - clusters)

        rest, most = mask & ~pool, max(1, *numbers)
        into = nearest(x, rest, peaks(x, rest, clusters, most, _NEIGHBOURS, capped=False), most)
        into = into.view_as(videos.mask)
        return torch.where(pool.view_as(into), flat_indices(into), into), None


@dataclass(frozen=True)
class _InnerUniPool(Pruner):
    """The second cut: keep what some text token attends to or resembles, and merge every other token into the most
    similar one of these.

    layer: where it cuts. balance: see `UniPool`.
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
            some = text.mask.any(1, keepdim=True)
            attention = torch.where(some, tokens.text_sum_and_max[:, 1], attention)
            cosine = torch.where(some, best_match(tokens.hidden, text.hidden, text.mask)[0], cosine)
        score = self.balance * rescale(attention.nan_to_num(nan=0.0), tokens.mask)
        score = score + (1 - self.balance) * rescale(cosine, tokens.mask)
        return merge_dropped(Selection.top(score, tokens), tokens)
