# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.clusters import farthest_weighted, roots
from tokenprune.kernels.join import join
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import cosine, frame_means, segments_at, shares
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import (
    TwoCutMerger,
    cluster_frames,
    count_members,
    find_first_frames,
    flat_indices,
    gather_flat,
    get_tower_attention,
    split_in_segments,
)
from tokenprune.selection.method import Pruner, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_SCENE = 0.9  # frames less alike than that are of different segments
_LONG = 4  # frames of a segment, at most on average


@register(
    "flashvid",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2602.08024, ICLR 2026",
    merges=True,
)
@dataclass(frozen=True)
class FlashVID(TwoCutMerger):
    """Keep of each frame what is attended to and differs most, let the rest grow together from frame to frame, and cut
    again inside the decoder (FlashVID).

    The picks of a frame are tokens far from each other, by cosine distance times the attention that they get in the
    vision tower. Every other token joins the most similar one of the frame before, wherever that is, if they are
    similar enough: chains become trees, and a tree becomes its mean, at its first token. Where there are more trees
    than the budget allows they are clustered within their frame. The second cut keeps what the last prompt token
    attends to most.

    keep: tokens averaged over the decoder's layers, the second cut included.
    picks: share in (0, 1] of a frame's tokens that are picked; the others are trees.
    threshold: cosine above which a token joins one of the frame before.
    inner: False leaves out the second cut: the choice then knows nothing of the question, and `keep` is the first cut.
    layer: int >= 1, decoder layer of the second cut, ranked by the layer before it; None: 20 of 28, in proportion.
    inner_keep: share of the tokens that the second cut keeps.

    Source: "FlashVID: Efficient Video Large Language Models via Training-free Tree-based Spatiotemporal Token Merging";
    the authors' code for what it leaves open (segments, the threshold that rises, clusters of trees).

    Differs from the paper: picks by attention alone (the code's first form; the second one also multiplies by how
    typical a token is of its segment, which may be negative); a tree is the mean of all its tokens (the code divides by
    one more than its root's direct children); what is picked is not merged as well; counts are exact, split by largest
    remainder; where fewer trees are asked for than a frame's share of them, the threshold rises link by link. A video
    has at least a quarter as many segments as frames (the authors set 8 of 32, or 4 of 16). Trees of a frame whose
    share is none go.
    """

    depth: ClassVar[float] = 20 / 28

    picks: Annotated[float, Gt(0), Le(1)] = 0.7
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.8
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.3

    def build_second_cut(self, layer: int) -> Pruner:
        return _InnerFlashVid(layer)

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        mask, most = videos.mask, max(videos.keep)
        means = frame_means(videos.x, mask)
        least = -(-videos.number // _LONG)
        first = find_first_frames(segments_at(cosine(means[:, 1:], means[:, :-1]), videos.number, least, _SCENE))

        budget = shares(torch.ones_like(videos.sizes), videos.budget, videos.sizes)  # of each frame
        number = torch.minimum(budget, (budget.double() * self.picks - 1e-9).ceil().long())
        picked = self._picked(videos, number)
        rest = mask & ~picked
        # long [V, F], the trees that a segment keeps, at its first frame.
        wanted = torch.zeros_like(first).scatter_add(1, first, budget - number)

        parent = self._parents(videos, rest, first, wanted)
        root = roots(parent.flatten(1), first.shape[1]).view_as(parent)
        tree = rest & (root == flat_indices(root))
        trees = tree.sum(2)
        numbers = split_in_segments(trees, wanted, trees, first)

        size = count_members(root, rest)
        _, of = cluster_frames(_means(videos.x, root, rest, size), tree, numbers, most)
        into = torch.where(rest, gather_flat(of, root), torch.where(picked, flat_indices(root), -1))
        part = (
            1
            / (gather_flat(size, root) * gather_flat(count_members(of, tree), gather_flat(of, root)))
            .clamp(min=1)
            .float()
        )
        return into, torch.where(rest, part, 1.0)

    def _picked(self, videos: Videos, number: torch.Tensor) -> torch.Tensor:
        """bool `[V, F, P]`: so many tokens of each frame that are far from each other. number: long `[V, F]`."""
        x, mask, attention = (one.flatten(0, 1) for one in (videos.x, videos.mask, get_tower_attention(videos)))
        most = max(-(-keep // len(frames)) for keep, frames in zip(videos.keep, videos.frames, strict=True))
        return farthest_weighted(x, mask, attention, number.flatten(), most).view_as(videos.mask)

    def _parents(self, videos: Videos, rest: torch.Tensor, first: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """long `[V, F, P]`: the spot in the frame before that each token joins, else its own.

        rest: bool `[V, F, P]`, tokens that are not picked; first, wanted: see `merge`.
        """
        spot, (count, frames, places) = flat_indices(rest).expand_as(rest), rest.shape
        if frames == 1:
            return spot
        x = videos.x
        alike, place = (
            torch.nn.functional.pad(one.view(count, frames - 1, places), (0, 0, 1, 0))
            for one in best_match(x[:, 1:].flatten(0, 1), x[:, :-1].flatten(0, 1), rest[:, :-1].flatten(0, 1))
        )
        alike = alike.clamp(max=1)
        index = torch.arange(frames, device=first.device)
        links = rest & (alike > self.threshold) & (first < index).unsqueeze(-1)
        # No more links than leave a segment as many trees as it keeps: those between the most similar tokens.
        room = torch.zeros_like(first).scatter_add(1, first, rest.sum(2)) - wanted
        segment = torch.where(links, first.unsqueeze(-1), frames)
        rank = rank_in_group(segment.flatten(1), alike.flatten(1)).view_as(links)
        links &= rank < room.gather(1, first).unsqueeze(-1)
        return torch.where(links, (spot // places - 1) * places + place, spot)


def _means(x: torch.Tensor, root: torch.Tensor, rest: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """float32 `[V, F, P, D]`: at the root of each tree the mean of its tokens; what is elsewhere is of no meaning."""
    rows = torch.arange(len(x), device=x.device)[:, None, None] * root[0].numel()
    nowhere = root.numel()
    spot = flat_indices(root) + rows
    target = torch.where(rest & (root != flat_indices(root)), root + rows, nowhere).flatten()
    ones = torch.ones(nowhere, dtype=torch.float32, device=x.device)
    return join(x.flatten(0, 2), None, ones, spot.flatten(), target, ones).view_as(x)


@dataclass(frozen=True)
class _InnerFlashVid(Pruner):
    """The second cut: keep what the last prompt token attends to most in the layer before.

    layer: where it cuts.
    """

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True

    layer: int

    name: ClassVar[str] = "flashvid"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"last_row_attention"})

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.last_row_attention.mean(dim=1)
