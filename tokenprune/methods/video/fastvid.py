# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.clusters import find_density_peaks
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.temporal import cosine_similarity, find_segment_ends, frame_means, split_budget
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import (
    VideoMerger,
    count_members,
    find_first_frames,
    flat_indices,
    gather_flat,
    get_tower_attention,
    split_in_segments,
    sum_segments,
)
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_NEIGHBOURS = 4  # nearest neighbours in the density of a token


@register(
    "fastvid",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2503.11187, NeurIPS 2025",
    merges=True,
)
@dataclass(frozen=True)
class FastVID(VideoMerger):
    """Keep attended tokens of each frame and merge the rest by density (FastVID).

    The video is split into segments at the largest changes between frames. Each frame has an equal budget. One part of
    it keeps the tokens with the most attention in the vision tower. The other part gives the segment's anchor frames
    centres at density peaks. Every other token merges into the most similar centre of the nearest anchor frame.

    Args:
        segments: Minimum number of segments, limited by the number of frames.
        threshold: Two neighbouring frames belong to different segments if the cosine of their means is below it.
        context: Share of the budget for centres, in [0, 1].
        step: Spacing of anchor frames in a segment, counted back from its last frame.
        centre: Minimum weight of a centre in the mean of its cluster, in (0, 1]. The members share the rest.

    Source:
        Shen et al., "FastVID: Dynamic Density Pruning for Fast Video Large Language Models" (arXiv 2503.11187). Frame
        features and attention follow the authors' code for Qwen2.5-VL: the mean of the frame's tokens, and the
        attention received in the tower.

    Differences from the paper:
        - A token joins one centre, of the nearest anchor frame; the earlier of two. In the paper it joins one centre
          per anchor frame of its segment, so it counts several times.
        - Counts are exact, split by largest remainder.
        - Centres that do not fit into the anchor frames become attended tokens of the other frames.
        - A video with fewer frames than `segments` has one segment per frame.
        - No frames are skipped.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, FastVID(segments=4), keep=0.25)
    """

    segments: Annotated[int, Ge(1)] = 8
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.9
    context: Annotated[float, Ge(0), Le(1)] = 0.4
    step: Annotated[int, Ge(1)] = 4
    centre: Annotated[float, Gt(0), Le(1)] = 0.6

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        mask, sizes = videos.mask, videos.sizes
        means = frame_means(videos.hidden, mask)
        similarity = cosine_similarity(means[:, 1:], means[:, :-1])
        first = find_first_frames(find_segment_ends(similarity, videos.num_frames, self.segments, self.threshold))
        anchor = self._find_anchors(first, sizes > 0)

        budget = split_budget(torch.ones_like(sizes), videos.budget, sizes)
        context = (budget.double() * self.context + 1e-9).long()
        salient, context_total = budget - context, sum_segments(context, first)
        capacity = sizes - salient
        centres = split_in_segments(anchor.long(), context_total, capacity * anchor, first)
        overflow = context_total - sum_segments(centres, first)  # centres that do not fit into the anchor frames
        salient += split_in_segments((~anchor).long(), overflow, capacity * ~anchor, first)

        top = videos.top_per_frame(get_tower_attention(videos), salient)
        rest, max_kept = mask & ~top, max(videos.keep)
        rest_frames = rest.flatten(0, 1)
        num_centres, max_centres = centres.flatten(), min(max_kept, mask.shape[2])
        x = videos.hidden.flatten(0, 1)
        peak = find_density_peaks(x, rest_frames, num_centres, max_centres, _NEIGHBOURS, capped=False).view_as(mask)
        target = torch.where(top, flat_indices(mask), -1)
        centre_index = self._find_centres(videos, peak, find_nearest_anchor(first, centres > 0), max_kept)
        target = torch.where(rest, centre_index, target)
        num_members = gather_flat(count_members(target, rest), target).clamp(min=1)
        weight = (1 / (num_members.float() + 1)).clamp(min=self.centre)
        weights = (1 - weight) / num_members + weight * peak
        return target, torch.where(rest, weights, 1.0)

    def _find_anchors(self, first: torch.Tensor, is_valid: torch.Tensor) -> torch.Tensor:
        """Return the anchor frames, shape (videos, frames), bool. `is_valid` is False for padding frames."""
        length = sum_segments(is_valid.long(), first).gather(1, first)
        index = torch.arange(first.shape[1], device=first.device) - first
        return is_valid & ((length - 1 - index) % self.step == 0)

    def _find_centres(self, videos: Videos, peak: torch.Tensor, anchor: torch.Tensor, max_centres: int) -> torch.Tensor:
        """Return the most similar centre of each token in its anchor frame, shape (videos, frames, patches), int64.

        Args:
            videos: Tokens by frame.
            peak: Mask of the centres, shape (videos, frames, patches). A centre maps to itself.
            anchor: Anchor frame of each frame, shape (videos, frames), or -1. Tokens without an anchor map to -1.
            max_centres: Maximum number of centres per video.
        """
        x, num_patches = videos.hidden.flatten(1, 2), peak.shape[2]
        centre_index = partition(peak.flatten(1))[:, :max_centres]
        group = anchor.repeat_interleave(num_patches, dim=1)
        allowed = peak.flatten(1).gather(1, centre_index)
        centres, frame = gather_tokens(x, centre_index, 1), centre_index // num_patches
        _, nearest = best_match(x, centres, allowed, group_a=group, group_b=frame)
        flat_index = centre_index.gather(1, nearest).masked_fill(group < 0, -1).view_as(peak)
        return torch.where(peak, flat_indices(peak), flat_index)


def find_nearest_anchor(first: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Return the nearest anchor frame in the segment of each frame, shape (videos, frames), int64, or -1.

    The earlier of two equally near anchors is used.

    Args:
        first: First frame of each frame's segment, shape (videos, frames). See `find_first_frames`.
        anchors: Mask of the anchor frames, shape (videos, frames).
    """
    frames = first.shape[1]
    index = torch.arange(frames, device=first.device)
    distance = 2 * (index[:, None] - index).abs() + (index > index[:, None])
    allowed = anchors.unsqueeze(1) & (first.unsqueeze(1) == first.unsqueeze(2))
    nearest = torch.where(allowed, distance, 4 * frames).min(2)
    return nearest.indices.masked_fill(nearest.values == 4 * frames, -1)
