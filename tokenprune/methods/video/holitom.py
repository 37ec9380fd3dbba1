# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import same_place, segments_by_stillness, shares
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import (
    StaticPatches,
    TwoCutMerger,
    cluster_frames,
    count_members,
    flat_indices,
    gather_flat,
    get_tower_attention,
    merge_dropped,
)
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_FEW = 0.125  # of a video's tokens, below which the paper's lower threshold goes


@register(
    "holitom",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2505.21334, NeurIPS 2025",
    merges=True,
)
@dataclass(frozen=True)
class HoliTom(TwoCutMerger):
    """Merge what stands still in a video over whole segments, keep of the rest what the vision tower attends to, and
    cut again inside the decoder (HoliTom).

    A place is still in a segment of frames if its token is similar to the one before in all of them; a dynamic
    programme cuts the video into segments such that most tokens are at still places. Those become their mean over time,
    and the means are clustered. Of the moving tokens of a frame those with most attention in the vision tower stay, the
    others go. Clusters and frames have their budget in proportion to what they hold. The second cut keeps what the last
    prompt token attends to, and merges the others into the most similar ones of these.

    keep: tokens averaged over the decoder's layers, the second cut included.
    threshold: cosine above which a token stands still; None: 0.65 where less than an eighth of the video is kept, else
    0.8.
    centre: weight in (0, 1] of a cluster's centre; the other members share the rest.
    inner: False leaves out the second cut: the choice then knows nothing of the question, and `keep` is the first cut.
    layer: int >= 1, decoder layer of the second cut, ranked by the layer before it; None: 18 of 28, in proportion.
    inner_keep: share of the tokens that the second cut keeps.

    Source: Shao et al., "HoliTom: Holistic Token Merging for Fast Video Large Language Models"; the authors' code for
    what it leaves open (attention without a class token, the weights in a cluster, thresholds).

    Differs from the paper: counts are exact, split among clusters and frames by largest remainder, each at least one if
    there are enough (the code rounds up); where more is kept than merging leaves, the still tokens least similar to the
    one before stay by themselves; tokens stay in order of position, a merged one at its centre in the segment's first
    frame; the second cut takes the plain mean of all that goes into a token (the code averages pair by pair, in an
    order). Where the lower threshold ends is ours: the authors set it for each share. Moving tokens are never merged,
    as in the authors' setting.
    """

    depth: ClassVar[float] = 18 / 28

    threshold: Annotated[float, Ge(-1), Le(1)] | None = None
    centre: Annotated[float, Gt(0), Le(1)] = 0.6

    def build_second_cut(self, layer: int) -> Pruner:
        return _InnerHoliTom(layer)

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        similarity = same_place(videos.x, videos.mask)
        both = videos.mask[:, 1:] & videos.mask[:, :-1]
        stands = (similarity > self._thresholds(videos)[:, None, None]) & both
        # What is after the last frame of a shorter video begins another segment.
        ends = segments_by_stillness(stands.float(), both, videos.number, 0.5) | (videos.sizes[:, 1:] == 0)
        static = StaticPatches.from_segments(videos, ends, _still(stands, ends, videos.mask), similarity)

        room = videos.budget - static.unmerged.sum((1, 2))
        heads, moving = static.heads, static.moving
        sizes = torch.stack([heads.sum(2), moving.sum(2)], dim=2)  # [V, F, 2]: of each frame, still before moving
        numbers = shares(sizes.flatten(1), room, sizes.flatten(1), least=1).view_as(sizes)

        picked = top_mask(
            get_tower_attention(videos).flatten(0, 1), moving.flatten(0, 1), numbers[..., 1].flatten(), moving.shape[2]
        ).view_as(moving)
        into = torch.where(picked | static.unmerged, flat_indices(moving), -1)

        centres, of = cluster_frames(static.compute_means(), heads, numbers[..., 0], max(videos.keep))
        others = gather_flat(count_members(of, heads & ~centres), of)  # of the cluster that a still place is in
        own, rest = (others == 0).float().clamp(min=self.centre), (1 - self.centre) / others.clamp(min=1).float()
        part = torch.where(centres, own, rest) / static.count_merged().clamp(min=1)
        into = torch.where(static.mask, static.expand(of), into)
        return into, torch.where(static.mask, static.expand(part), 1.0)

    def _thresholds(self, videos: Videos) -> torch.Tensor:
        """float32 `[V]`, on the device."""
        counts = [sum(sizes) for sizes in videos.frames]
        few = [keep < _FEW * count for keep, count in zip(videos.keep, counts, strict=True)]
        given = [self.threshold if self.threshold is not None else 0.65 if one else 0.8 for one in few]
        return to_device(given, videos.mask.device, torch.float32)


def _still(stands: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """bool `[V, F, P]`: tokens at places that stand still in all steps of their segment. stands: bool `[V, F - 1, P]`,
    whether each step does; ends: bool `[V, F - 1]`."""
    still, frames = mask.clone(), mask.shape[1]
    step = stands | ends.unsqueeze(-1)  # what a segment's end divides need not be alike
    for frame in range(1, frames):  # as far as to the frame
        still[:, frame] &= step[:, frame - 1] & (still[:, frame - 1] | ends[:, frame - 1, None])
    for frame in range(frames - 2, -1, -1):  # and after it
        still[:, frame] &= still[:, frame + 1] | ends[:, frame, None]
    apart = torch.nn.functional.pad(ends, (1, 0), value=True) & torch.nn.functional.pad(ends, (0, 1), value=True)
    return still & ~apart.unsqueeze(-1)


@dataclass(frozen=True)
class _InnerHoliTom(Pruner):
    """The second cut: keep what the last prompt token attends to most in the layer before, and merge every other token
    into the most similar one of these.

    layer: where it cuts.
    """

    layer: int

    query_aware: ClassVar[bool] = True
    name: ClassVar[str] = "holitom"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"last_row_attention"})
    merges: ClassVar[bool] = True

    def select(self, tokens: VisualTokens) -> Selection:
        return merge_dropped(Selection.top(tokens.last_row_attention.mean(dim=1), tokens), tokens)
