# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.clusters import find_roots, select_farthest_weighted
from tokenprune.kernels.join import join
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import cosine_similarity, find_segment_ends, frame_means, split_budget
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

_SCENE = 0.9  # frames with a lower cosine belong to different segments
_LONG = 4  # maximum mean length of a segment, in frames


@register(
    "flashvid",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2602.08024, ICLR 2026",
    merges=True,
)
@dataclass(frozen=True)
class FlashVID(TwoCutMerger):
    """Keep diverse attended tokens and merge the rest in trees over time (FlashVID).

    The picks of a frame are tokens far from each other, by cosine distance times their attention in the vision tower.
    Every other token joins the most similar token of the previous frame, at any position, if the similarity exceeds
    `threshold`. These links form trees, and a tree becomes its mean at its first token. If there are more trees than
    the budget allows, the trees of a frame are clustered. A second cut inside the decoder keeps the tokens that the
    last prompt token attends to most.

    `keep` is the average number of tokens over the decoder's layers, including the second cut.

    Args:
        picks: Share of a frame's tokens that is picked, in (0, 1]. The other kept tokens are trees.
        threshold: Cosine above which a token joins a token of the previous frame.
        inner: Make the second cut. False makes the selection independent of the question; `keep` is then the first cut.
        layer: Decoder layer of the second cut, ranked by the layer before it. None: layer 20 of 28, scaled to the
            depth.
        inner_keep: Share of the tokens that the second cut keeps.

    Source:
        "FlashVID: Efficient Video Large Language Models via Training-free Tree-based Spatiotemporal Token Merging"
        (arXiv 2602.08024), and the authors' code for segments, the rising threshold, and clusters of trees.

    Differences from the paper:
        - Picks use attention only, as in the first form of the code. The second form also multiplies by the similarity
          of a token to its segment, which may be negative.
        - A tree becomes the mean of all its tokens. The code divides by one plus the number of the root's direct
          children.
        - Picked tokens are not merged again.
        - Counts are exact, split by largest remainder. If a frame's share of trees is smaller, the threshold rises link
          by link. The trees of a frame with a share of zero are dropped.
        - A video has at least a quarter as many segments as frames. The authors set 8 of 32, or 4 of 16.

    Example:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, FlashVID(inner=False), keep=0.25)
    """

    depth: ClassVar[float] = 20 / 28

    picks: Annotated[float, Gt(0), Le(1)] = 0.7
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.8
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.3

    def build_second_cut(self, layer: int) -> Pruner:
        return _InnerFlashVid(layer)

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        mask, most = videos.mask, max(videos.keep)
        means = frame_means(videos.hidden, mask)
        least = -(-videos.num_frames // _LONG)
        first = find_first_frames(
            find_segment_ends(cosine_similarity(means[:, 1:], means[:, :-1]), videos.num_frames, least, _SCENE)
        )

        budget = split_budget(torch.ones_like(videos.sizes), videos.budget, videos.sizes)  # per frame
        number = torch.minimum(budget, (budget.double() * self.picks - 1e-9).ceil().long())
        picked = self._picked(videos, number)
        rest = mask & ~picked
        # Trees that a segment keeps, at its first frame, shape (videos, frames).
        wanted = torch.zeros_like(first).scatter_add(1, first, budget - number)

        parent = self._parents(videos, rest, first, wanted)
        root = find_roots(parent.flatten(1), first.shape[1]).view_as(parent)
        tree = rest & (root == flat_indices(root))
        trees = tree.sum(2)
        numbers = split_in_segments(trees, wanted, trees, first)

        size = count_members(root, rest)
        _, of = cluster_frames(_means(videos.hidden, root, rest, size), tree, numbers, most)
        into = torch.where(rest, gather_flat(of, root), torch.where(picked, flat_indices(root), -1))
        part = (
            1
            / (gather_flat(size, root) * gather_flat(count_members(of, tree), gather_flat(of, root)))
            .clamp(min=1)
            .float()
        )
        return into, torch.where(rest, part, 1.0)

    def _picked(self, videos: Videos, number: torch.Tensor) -> torch.Tensor:
        """Return mutually distant tokens of each frame, `number` (videos, frames) of them, as a mask."""
        x, mask, attention = (one.flatten(0, 1) for one in (videos.hidden, videos.mask, get_tower_attention(videos)))
        most = max(-(-keep // len(frames)) for keep, frames in zip(videos.keep, videos.frames, strict=True))
        return select_farthest_weighted(x, mask, attention, number.flatten(), most).view_as(videos.mask)

    def _parents(self, videos: Videos, rest: torch.Tensor, first: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the flat index of the token that each token joins, shape (videos, frames, patches), int64.

        Tokens that start a tree map to themselves.

        Args:
            videos: Tokens by frame.
            rest: Tokens that are not picked, shape (videos, frames, patches).
            first: First frame of each frame's segment, shape (videos, frames).
            wanted: Trees that a segment keeps, at its first frame, shape (videos, frames).
        """
        spot, (count, frames, places) = flat_indices(rest).expand_as(rest), rest.shape
        if frames == 1:
            return spot
        x = videos.hidden
        alike, place = (
            torch.nn.functional.pad(one.view(count, frames - 1, places), (0, 0, 1, 0))
            for one in best_match(x[:, 1:].flatten(0, 1), x[:, :-1].flatten(0, 1), rest[:, :-1].flatten(0, 1))
        )
        alike = alike.clamp(max=1)
        index = torch.arange(frames, device=first.device)
        links = rest & (alike > self.threshold) & (first < index).unsqueeze(-1)
        # Keep the links between the most similar tokens, so that each segment keeps enough trees.
        room = torch.zeros_like(first).scatter_add(1, first, rest.sum(2)) - wanted
        segment = torch.where(links, first.unsqueeze(-1), frames)
        rank = rank_in_group(segment.flatten(1), alike.flatten(1)).view_as(links)
        links &= rank < room.gather(1, first).unsqueeze(-1)
        return torch.where(links, (spot // places - 1) * places + place, spot)


def _means(x: torch.Tensor, root: torch.Tensor, rest: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return the mean of each tree at its root, (videos, frames, patches, channels). Other entries are undefined."""
    rows = torch.arange(len(x), device=x.device)[:, None, None] * root[0].numel()
    nowhere = root.numel()
    spot = flat_indices(root) + rows
    target = torch.where(rest & (root != flat_indices(root)), root + rows, nowhere).flatten()
    ones = torch.ones(nowhere, dtype=torch.float32, device=x.device)
    return join(x.flatten(0, 2), None, ones, spot.flatten(), target, ones).view_as(x)


@dataclass(frozen=True)
class _InnerFlashVid(Pruner):
    """Second cut: keep the tokens with the most attention from the last prompt token in the layer before `layer`."""

    query_aware: ClassVar[bool] = True
    never_nan: ClassVar[bool] = True

    layer: int

    name: ClassVar[str] = "flashvid"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"last_row_attention"})

    def score(self, tokens: VisualTokens) -> torch.Tensor:
        return tokens.last_row_attention.mean(dim=1)
