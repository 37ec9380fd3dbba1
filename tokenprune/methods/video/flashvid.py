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

_MIN_SIMILARITY = 0.9  # frames with a lower cosine belong to different segments
_MAX_MEAN_LENGTH = 4  # maximum mean length of a segment, in frames


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

    Examples:
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
        mask, max_kept = videos.mask, max(videos.keep)
        means = frame_means(videos.hidden, mask)
        min_segments = -(-videos.num_frames // _MAX_MEAN_LENGTH)
        similarity = cosine_similarity(means[:, 1:], means[:, :-1])
        first = find_first_frames(find_segment_ends(similarity, videos.num_frames, min_segments, _MIN_SIMILARITY))

        budget = split_budget(torch.ones_like(videos.sizes), videos.budget, videos.sizes)  # per frame
        num_picks = torch.minimum(budget, (budget.double() * self.picks - 1e-9).ceil().long())
        picked = self._pick(videos, num_picks)
        rest = mask & ~picked
        # Trees that a segment keeps, at its first frame, shape (videos, frames).
        num_trees = torch.zeros_like(first).scatter_add(1, first, budget - num_picks)

        parent = self._find_parents(videos, rest, first, num_trees)
        root = find_roots(parent.flatten(1), first.shape[1]).view_as(parent)
        is_root = rest & (root == flat_indices(root))
        roots_per_frame = is_root.sum(2)
        trees_per_frame = split_in_segments(roots_per_frame, num_trees, roots_per_frame, first)

        size = count_members(root, rest)
        means = _compute_tree_means(videos.hidden, root, rest, size)
        _, cluster = cluster_frames(means, is_root, trees_per_frame, max_kept)
        target = torch.where(rest, gather_flat(cluster, root), torch.where(picked, flat_indices(root), -1))
        # A token counts 1 / (tokens of its tree * trees of its cluster).
        trees_per_cluster = gather_flat(count_members(cluster, is_root), gather_flat(cluster, root))
        weights = 1 / (gather_flat(size, root) * trees_per_cluster).clamp(min=1).float()
        return target, torch.where(rest, weights, 1.0)

    def _pick(self, videos: Videos, num_picks: torch.Tensor) -> torch.Tensor:
        """Return mutually distant tokens of each frame as a mask. `num_picks` (videos, frames) is their number."""
        x, mask, attention = (
            tensor.flatten(0, 1) for tensor in (videos.hidden, videos.mask, get_tower_attention(videos))
        )
        max_picks = max(-(-keep // len(frames)) for keep, frames in zip(videos.keep, videos.frames, strict=True))
        return select_farthest_weighted(x, mask, attention, num_picks.flatten(), max_picks).view_as(videos.mask)

    def _find_parents(
        self, videos: Videos, rest: torch.Tensor, first: torch.Tensor, num_trees: torch.Tensor
    ) -> torch.Tensor:
        """Return the flat index of the token that each token joins, shape (videos, frames, patches), int64.

        Tokens that start a tree map to themselves.

        Args:
            videos: Tokens by frame.
            rest: Tokens that are not picked, shape (videos, frames, patches).
            first: First frame of each frame's segment, shape (videos, frames).
            num_trees: Trees that a segment keeps, at its first frame, shape (videos, frames).
        """
        index, (num_videos, frames, num_patches) = flat_indices(rest).expand_as(rest), rest.shape
        if frames == 1:
            return index
        x = videos.hidden
        similarity, match_index = (
            torch.nn.functional.pad(tensor.view(num_videos, frames - 1, num_patches), (0, 0, 1, 0))
            for tensor in best_match(x[:, 1:].flatten(0, 1), x[:, :-1].flatten(0, 1), rest[:, :-1].flatten(0, 1))
        )
        similarity = similarity.clamp(max=1)
        frame_index = torch.arange(frames, device=first.device)
        links = rest & (similarity > self.threshold) & (first < frame_index).unsqueeze(-1)
        # Keep the links between the most similar tokens, so that each segment keeps enough trees.
        num_links = torch.zeros_like(first).scatter_add(1, first, rest.sum(2)) - num_trees
        segment = torch.where(links, first.unsqueeze(-1), frames)
        rank = rank_in_group(segment.flatten(1), similarity.flatten(1)).view_as(links)
        links &= rank < num_links.gather(1, first).unsqueeze(-1)
        return torch.where(links, (index // num_patches - 1) * num_patches + match_index, index)


def _compute_tree_means(x: torch.Tensor, root: torch.Tensor, rest: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return the mean of each tree at its root, (videos, frames, patches, channels). Other entries are undefined."""
    rows = torch.arange(len(x), device=x.device)[:, None, None] * root[0].numel()
    outside = root.numel()
    index = flat_indices(root) + rows
    target = torch.where(rest & (root != flat_indices(root)), root + rows, outside).flatten()
    weights = torch.ones(outside, dtype=torch.float32, device=x.device)
    return join(x.flatten(0, 2), None, weights, index.flatten(), target, weights).view_as(x)


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
