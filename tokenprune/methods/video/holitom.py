# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le

from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import find_static_segment_ends, previous_frame_similarity, split_budget
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

_LOW_KEEP = 0.125  # share of kept tokens below which the lower threshold applies


@register(
    "holitom",
    site=Site.PRE_LLM,
    needs=("frames", "encoder_attention"),
    paper="arXiv 2505.21334, NeurIPS 2025",
    merges=True,
)
@dataclass(frozen=True)
class HoliTom(TwoCutMerger):
    """Merge static patches over time and keep attended moving tokens (HoliTom).

    A patch is static in a segment if each of its tokens is similar to the token before it. Dynamic programming splits
    the video into segments with the most static tokens. Static tokens become their mean over time, and these means are
    clustered. Of the moving tokens of a frame, the tokens with the most attention in the vision tower are kept and the
    others are dropped. Clusters and frames share the budget in proportion to their sizes. A second cut inside the
    decoder keeps the tokens that the last prompt token attends to most, and merges the others into the most similar
    kept tokens.

    `keep` is the average number of tokens over the decoder's layers, including the second cut.

    Args:
        threshold: Cosine above which a token is static. None: 0.65 if less than an eighth of the video is kept, else
            0.8.
        centre: Weight of a cluster's centre in its mean, in (0, 1]. The other members share the rest.
        inner: Make the second cut. False makes the selection independent of the question; `keep` is then the first cut.
        layer: Decoder layer of the second cut, ranked by the layer before it. None: layer 18 of 28, scaled to the
            depth.
        inner_keep: Share of the tokens that the second cut keeps.

    Source:
        Shao et al., "HoliTom: Holistic Token Merging for Fast Video Large Language Models" (arXiv 2505.21334), and the
        authors' code for attention without a class token, the weights in a cluster, and thresholds.

    Differences from the paper:
        - Counts are exact, split among clusters and frames by largest remainder, with at least one each if possible.
          The code rounds up.
        - If merging leaves fewer tokens than the budget, static tokens with the lowest similarity stay unmerged.
        - Tokens stay in order of position. A merged token takes the position of its centre in the segment's first
          frame.
        - The second cut takes the plain mean of merged tokens. The code averages pair by pair, which depends on the
          order.
        - The limit of the lower threshold is an addition. The authors set the threshold per share.
        - Moving tokens are not merged, as in the authors' setting.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, HoliTom(inner=False), keep=0.25)
    """

    depth: ClassVar[float] = 18 / 28

    threshold: Annotated[float, Ge(-1), Le(1)] | None = None
    centre: Annotated[float, Gt(0), Le(1)] = 0.6

    def build_second_cut(self, layer: int) -> Pruner:
        return _InnerHoliTom(layer)

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        similarity = previous_frame_similarity(videos.hidden, videos.mask)
        is_pair = videos.mask[:, 1:] & videos.mask[:, :-1]
        is_static = (similarity > self._choose_thresholds(videos)[:, None, None]) & is_pair
        # Padding after the last frame of a shorter video starts a new segment.
        ends = find_static_segment_ends(is_static.float(), is_pair, videos.num_frames, 0.5) | (videos.sizes[:, 1:] == 0)
        static = _find_static(is_static, ends, videos.mask)
        static_patches = StaticPatches.from_segments(videos, ends, static, similarity)

        budget = videos.budget - static_patches.unmerged.sum((1, 2))
        heads, moving = static_patches.heads, static_patches.moving
        sizes = torch.stack([heads.sum(2), moving.sum(2)], dim=2)  # [V, F, 2]: static and moving tokens per frame
        counts = split_budget(sizes.flatten(1), budget, sizes.flatten(1), min_tokens=1).view_as(sizes)

        attention = get_tower_attention(videos).flatten(0, 1)
        picked = top_mask(attention, moving.flatten(0, 1), counts[..., 1].flatten(), moving.shape[2]).view_as(moving)
        target = torch.where(picked | static_patches.unmerged, flat_indices(moving), -1)

        centres, cluster = cluster_frames(static_patches.compute_means(), heads, counts[..., 0], max(videos.keep))
        num_others = gather_flat(count_members(cluster, heads & ~centres), cluster)  # other members of each cluster
        centre_weight = (num_others == 0).float().clamp(min=self.centre)
        member_weight = (1 - self.centre) / num_others.clamp(min=1).float()
        weight = torch.where(centres, centre_weight, member_weight) / static_patches.count_merged().clamp(min=1)
        target = torch.where(static_patches.mask, static_patches.expand(cluster), target)
        return target, torch.where(static_patches.mask, static_patches.expand(weight), 1.0)

    def _choose_thresholds(self, videos: Videos) -> torch.Tensor:
        """Return the threshold of each video, shape (videos,), float32, on the device."""
        counts = [sum(sizes) for sizes in videos.frames]
        low_keep = [keep < _LOW_KEEP * count for keep, count in zip(videos.keep, counts, strict=True)]
        thresholds = [self.threshold if self.threshold is not None else 0.65 if is_low else 0.8 for is_low in low_keep]
        return to_device(thresholds, videos.mask.device, torch.float32)


def _find_static(is_static: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the tokens of patches that are static in their whole segment, shape (videos, frames, patches), bool.

    Args:
        is_static: Whether each step is static, shape (videos, frames - 1, patches).
        ends: Whether a segment ends after each frame, shape (videos, frames - 1).
        mask: False for padding, shape (videos, frames, patches).
    """
    static, frames = mask.clone(), mask.shape[1]
    joined = is_static | ends.unsqueeze(-1)  # frames of different segments need not be similar
    for frame in range(1, frames):  # from the segment's start
        static[:, frame] &= joined[:, frame - 1] & (static[:, frame - 1] | ends[:, frame - 1, None])
    for frame in range(frames - 2, -1, -1):  # and from its end
        static[:, frame] &= static[:, frame + 1] | ends[:, frame, None]
    is_single = torch.nn.functional.pad(ends, (1, 0), value=True) & torch.nn.functional.pad(ends, (0, 1), value=True)
    return static & ~is_single.unsqueeze(-1)


@dataclass(frozen=True)
class _InnerHoliTom(Pruner):
    """Second cut at `layer`: keep the tokens the last prompt token attends to most, and merge the others into them."""

    layer: int

    query_aware: ClassVar[bool] = True
    name: ClassVar[str] = "holitom"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"last_row_attention"})
    merges: ClassVar[bool] = True

    def select(self, tokens: VisualTokens) -> Selection:
        return merge_dropped(Selection.top(tokens.last_row_attention.mean(dim=1), tokens), tokens)
