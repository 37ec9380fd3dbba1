# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.clusters import assign_to_centres, find_density_peaks
from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import frame_means, previous_frame_similarity, split_budget
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import (
    StaticPatches,
    TwoCutMerger,
    cluster_frames,
    count_members,
    find_first_frames,
    flat_indices,
    gather_flat,
    sum_segments,
)
from tokenprune.selection.method import Pruner, Selection, Site
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos

_SCENE_SHARE = 0.25  # clusters of frames, as a share of the frames
_NEIGHBOURS = 7  # nearest neighbours in the density of a frame
_MAX_UNCLUSTERED = 14  # largest group that is not clustered


@register("prunevid", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2412.16117, ACL 2025 Findings", merges=True)
@dataclass(frozen=True)
class PruneVid(TwoCutMerger):
    """Merge static patches of a scene and cluster the rest (PruneVid).

    Scenes are contiguous clusters of frames. A patch is static in a scene if the mean cosine of all pairs of its tokens
    exceeds `threshold`; it becomes its mean over time. The static patches of a scene, and the other tokens of each
    frame, are clustered to half as many if there are more than 14, and each cluster becomes its mean. The second cut
    ranks tokens by the highest attention from any head and any text token after the video. Each scene's static part and
    each frame's other part get their share of it.

    `keep` is the average number of tokens over the decoder's layers, including the second cut.

    Args:
        threshold: Mean cosine above which a patch is static.
        inner: Make the second cut. False makes the selection independent of the question; `keep` is then the first cut.
        layer: Decoder layer of the second cut, ranked by the layer before it. None: layer 11 of 32, scaled to the
            depth.
        inner_keep: Share of the tokens that the second cut keeps.

    Source:
        Huang et al., "PruneVid: Visual Token Pruning for Efficient Video Large Language Models" (arXiv 2412.16117),
        implemented from its formulas only.

    Differences from the paper:
        - Counts are exact, in proportion to the sizes that the paper's rule gives scenes and frames.
        - If merging leaves fewer tokens than the budget, static tokens with the lowest similarity stay unmerged.
        - A cluster takes the position of its centre.
        - The second cut leaves the caches of earlier layers unchanged.
        - A video with fewer than four frames is one scene.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, PruneVid(threshold=0.9), keep=0.25)
    """

    syncs_device: ClassVar[bool] = True
    depth: ClassVar[float] = 11 / 32

    threshold: Annotated[float, Ge(-1), Le(1)] = 0.8
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.4

    def build_second_cut(self, layer: int) -> Pruner:
        return _InnerPruneVid(layer)

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        mask, max_kept = videos.mask, max(videos.keep)
        ends = self._find_scenes(videos)
        static = self._find_static(videos, find_first_frames(ends))
        static_patches = StaticPatches.from_segments(
            videos, ends, static, previous_frame_similarity(videos.hidden, mask)
        )
        heads, moving = static_patches.heads, static_patches.moving
        sizes = torch.stack([heads.sum(2), moving.sum(2)], dim=2)  # [V, F, 2]: static and moving tokens per frame
        room = videos.budget - static_patches.unmerged.sum((1, 2))
        halved = torch.where(sizes > _MAX_UNCLUSTERED, sizes // 2, sizes)
        # `min_tokens=1` assigns one token each first. Subtract it, so that the paper's total gives the paper's split.
        counts = split_budget((halved - 1).flatten(1), room, sizes.flatten(1), min_tokens=1).view_as(sizes)

        _, cluster = cluster_frames(static_patches.compute_means(), heads, counts[..., 0], max_kept, capped=False)
        num_members = gather_flat(count_members(cluster, heads), cluster)
        static_weight = 1 / (num_members * static_patches.count_merged()).clamp(min=1).float()
        _, target = cluster_frames(videos.hidden, moving, counts[..., 1], max_kept, capped=False)
        weight = 1 / gather_flat(count_members(target, moving), target).clamp(min=1).float()
        target = torch.where(static_patches.mask, static_patches.expand(cluster), target)
        target = torch.where(static_patches.unmerged, flat_indices(mask), target)
        weight = torch.where(static_patches.mask, static_patches.expand(static_weight), weight)
        weight = torch.where(static_patches.unmerged, 1.0, weight)

        # Groups of the second cut: the static tokens of a scene, and the other tokens of a frame.
        frame = torch.arange(mask.shape[1], device=mask.device)[:, None]
        self._remember(videos, torch.where(static_patches.mask, 2 * static_patches.first.unsqueeze(-1), 2 * frame + 1))
        return target, weight

    def _remember(self, videos: Videos, group: torch.Tensor) -> None:
        """Store the group of each token (V, F, P) for the second cut. Tokens outside of frames belong to group 0."""
        tokens = videos.tokens
        groups = torch.zeros_like(tokens.mask, dtype=torch.long)
        rows = to_device(videos.segments, groups.device)
        tokens.remember("group", groups.index_copy(0, rows, videos.ungroup(group)), per_token=True)
        tokens.remember("groups", 2 * group.shape[1])

    def _find_scenes(self, videos: Videos) -> torch.Tensor:
        """Return whether a scene ends after each frame, shape (V, F - 1), bool. A video's end is a scene's end."""
        is_valid = videos.sizes > 0
        means = frame_means(videos.hidden, videos.mask)
        scene_counts = [max(1, int(_SCENE_SHARE * len(sizes))) for sizes in videos.frames]
        num_scenes = to_device(scene_counts, is_valid.device)
        centres = find_density_peaks(means, is_valid, num_scenes, max(scene_counts), _NEIGHBOURS, capped=False)
        labels = assign_to_centres(means, is_valid, centres, max(scene_counts)).tolist()
        frames = is_valid.shape[1]
        ends = [
            [*find_scene_ends(frame_labels[: len(sizes)]), *[True] * frames][: frames - 1]
            for frame_labels, sizes in zip(labels, videos.frames, strict=True)
        ]
        return to_device(torch.tensor(ends, dtype=torch.bool, device="cpu").view(len(is_valid), -1), is_valid.device)

    def _find_static(self, videos: Videos, first: torch.Tensor) -> torch.Tensor:
        """Return the tokens of patches that are static in their scene, shape (V, F, P), bool."""
        direction = normalize(videos.hidden)
        squared_norms = sum_segments(direction.square().sum(-1), first)
        pairs = sum_segments(direction, first).square().sum(-1) - squared_norms
        length = sum_segments(videos.mask.long(), first)
        similarity = pairs / (length * (length - 1)).clamp(min=1)
        static = (similarity > self.threshold) & (length > 1)
        return videos.mask & static.gather(1, first.unsqueeze(-1).expand_as(static))


def find_scene_ends(labels: Sequence[int]) -> list[bool]:
    """Return whether a scene ends after each frame except the last.

    A label keeps its longest run of frames, or several runs of equal length, but no run of a single frame. From left
    to right, the frames between kept runs join the longer adjacent run (the earlier one if both are equally long).
    Adjacent runs with the same label become one scene.

    Args:
        labels: Cluster of each frame.
    """
    frame_runs = find_runs(labels)
    longest = {
        label: max(length for other_label, length in frame_runs if other_label == label) for label in set(labels)
    }
    kept = [label if length == longest[label] > 1 else None for label, length in frame_runs for _ in range(length)]
    runs, index = [[label, length] for label, length in find_runs(kept)], 0
    while index < len(runs):
        if runs[index][0] is not None or len(runs) == 1:
            index += 1
            continue
        neighbours = [neighbour for neighbour in (index - 1, index + 1) if 0 <= neighbour < len(runs)]
        runs[index][0] = runs[max(neighbours, key=lambda neighbour: (runs[neighbour][1], -neighbour))][0]
        frame_runs = find_runs([label for label, length in runs for _ in range(length)])
        runs, index = [[label, length] for label, length in frame_runs], 0
    return [end for _, length in runs for end in [*[False] * (length - 1), True]][:-1]


def find_runs(labels: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return (label, length) of each run of equal labels."""
    return [(label, len([*run])) for label, run in groupby(labels)]


@dataclass(frozen=True)
class _InnerPruneVid(Pruner):
    """Second cut at `layer`: keep the tokens of each group with the highest attention from any head and text token."""

    layer: int

    query_aware: ClassVar[bool] = True
    name: ClassVar[str] = "prunevid"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"text_attention"})

    def select(self, tokens: VisualTokens) -> Selection:
        rows = tokens.text_attention
        # Without text after the video, all scores are equal.
        score = rows.amax((1, 2)) if rows.shape[2] else torch.zeros_like(tokens.mask, dtype=torch.float32)
        groups = tokens.carry.get("groups", 1)
        group = tokens.carry.get("group", torch.zeros_like(tokens.mask, dtype=torch.long))
        group = group.masked_fill(~tokens.mask, groups)
        group_sizes = torch.zeros(len(group), groups + 1, dtype=torch.long, device=group.device)
        group_sizes = group_sizes.scatter_add(1, group, tokens.mask.long())
        budgets = split_budget(group_sizes, tokens.budget, group_sizes)
        keep = rank_in_group(group, score.nan_to_num(nan=-torch.inf)) < budgets.gather(1, group)
        return Selection(keep, counts=tokens.keep)
