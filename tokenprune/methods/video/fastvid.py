# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.clusters import peaks
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.temporal import cosine, frame_means, segments_at, shares
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

_NEIGHBOURS = 4  # of a token that tell how dense it is there


@register(
    "fastvid",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2503.11187, NeurIPS 2025",
    merges=True,
)
@dataclass(frozen=True)
class FastVID(VideoMerger):
    """Keep of each frame what the vision tower attends to, and gather the rest of a segment in a few centres of its
    anchor frames (FastVID).

    The video falls into segments where neighbouring frames differ most. One part of a frame's budget are the tokens
    with most attention; with the other part, anchor frames of the segment get centres, tokens at peaks of density, and
    every token that is not kept joins the most similar centre of the nearest anchor frame.

    segments: how many segments a video has at least, as far as it has frames.
    threshold: cosine of their means below which two frames are of different segments.
    context: share in [0, 1] of the budget that goes to centres.
    step: every so many frames of a segment, counted back from its last, is an anchor frame.
    centre: weight in (0, 1] that a centre has at least; what joins it shares the rest.

    Source: Shen et al., "FastVID: Dynamic Density Pruning for Fast Video Large Language Models"; the authors' code for
    Qwen2.5-VL for what a frame's feature and attention are (mean of its tokens, attention received in the tower).

    Differs from the paper: a token joins a centre of the nearest anchor frame only, of two equally near ones the
    earlier (there it joins one of each anchor frame of its segment, and so counts several times); counts are exact,
    split by largest remainder; centres that an anchor frame has no room for become tokens by attention in the other
    frames; a video of fewer frames than segments has as many segments as frames; no frames are passed over.
    """

    segments: Annotated[int, Ge(1)] = 8
    threshold: Annotated[float, Ge(-1), Le(1)] = 0.9
    context: Annotated[float, Ge(0), Le(1)] = 0.4
    step: Annotated[int, Ge(1)] = 4
    centre: Annotated[float, Gt(0), Le(1)] = 0.6

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        mask, sizes = videos.mask, videos.sizes
        means = frame_means(videos.x, mask)
        alike = cosine(means[:, 1:], means[:, :-1])
        first = find_first_frames(segments_at(alike, videos.number, self.segments, self.threshold))
        anchor = self._anchors(first, sizes > 0)

        budget = shares(torch.ones_like(sizes), videos.budget, sizes)
        context = (budget.double() * self.context + 1e-9).long()
        salient, total = budget - context, sum_segments(context, first)
        room = sizes - salient
        centres = split_in_segments(anchor.long(), total, room * anchor, first)
        more = total - sum_segments(centres, first)  # for which the anchor frames have no room
        salient += split_in_segments((~anchor).long(), more, room * ~anchor, first)

        top = videos.top_of_frames(get_tower_attention(videos), salient)
        rest, most = mask & ~top, max(videos.keep)
        flat = rest.flatten(0, 1)
        numbers, places = centres.flatten(), min(most, mask.shape[2])
        peak = peaks(videos.x.flatten(0, 1), flat, numbers, places, _NEIGHBOURS, capped=False).view_as(mask)
        into = torch.where(top, flat_indices(mask), -1)
        into = torch.where(rest, self._nearest(videos, peak, find_nearest_anchor(first, centres > 0), most), into)
        number = gather_flat(count_members(into, rest), into).clamp(min=1)
        weight = (1 / (number.float() + 1)).clamp(min=self.centre)
        part = (1 - weight) / number + weight * peak
        return into, torch.where(rest, part, 1.0)

    def _anchors(self, first: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """bool `[V, F]`: the anchor frames of each segment. real: bool `[V, F]`, frames that are there."""
        length = sum_segments(real.long(), first).gather(1, first)
        index = torch.arange(first.shape[1], device=first.device) - first
        return real & ((length - 1 - index) % self.step == 0)

    def _nearest(self, videos: Videos, peak: torch.Tensor, anchor: torch.Tensor, most: int) -> torch.Tensor:
        """long `[V, F, P]`: for each token the spot of the most similar centre in the anchor frame of its frame, for a
        centre its own; -1 where there is none. peak: bool `[V, F, P]`, centres; anchor: long `[V, F]`, -1 is none."""
        x, places = videos.x.flatten(1, 2), peak.shape[2]
        place = partition(peak.flatten(1))[:, :most]
        group = anchor.repeat_interleave(places, dim=1)
        allowed = peak.flatten(1).gather(1, place)
        _, found = best_match(x, gather_tokens(x, place, 1), allowed, group_a=group, group_b=place // places)
        spot = place.gather(1, found).masked_fill(group < 0, -1).view_as(peak)
        return torch.where(peak, flat_indices(peak), spot)


def find_nearest_anchor(first: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """long `[V, F]`: for each frame the nearest anchor frame of its segment, of two the earlier; -1 where there is
    none. first: long `[V, F]`, see `first_frames`; anchors: bool `[V, F]`."""
    frames = first.shape[1]
    index = torch.arange(frames, device=first.device)
    apart = 2 * (index[:, None] - index).abs() + (index > index[:, None])
    allowed = anchors.unsqueeze(1) & (first.unsqueeze(1) == first.unsqueeze(2))
    found = torch.where(allowed, apart, 4 * frames).min(2)
    return found.indices.masked_fill(found.values == 4 * frames, -1)
