# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt

from tokenprune.kernels.clusters import nearest, peaks
from tokenprune.kernels.pairs import unit
from tokenprune.kernels.take import rank_in_group
from tokenprune.kernels.temporal import frame_means, same_place, shares
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

_SEGMENTS = 0.25  # as many clusters of frames as this share of them
_NEIGHBOURS = 7
_WHOLE = 14  # of so few tokens none merge


@register("prunevid", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2412.16117, ACL 2025 Findings", merges=True)
@dataclass(frozen=True)
class PruneVid(TwoCutMerger):
    """Merge what stands still in a scene of a video, cluster what is left, and keep inside the decoder what some word
    of the question attends to (PruneVid).

    Scenes are clusters of frames, made contiguous. A place whose tokens are alike throughout a scene, by the mean of
    all pairs' cosines, becomes its mean over time. The still places of a scene, and the other tokens of each frame, are
    clustered, where they are more than 14 to half as many, and a cluster becomes its mean. The second cut ranks by the
    most attention that any head of any text token after the video pays in the layer before; each scene's still part
    and each frame's other part have their share of it.

    keep: tokens averaged over the decoder's layers, the second cut included.
    threshold: mean cosine above which a place stands still.
    inner: False leaves out the second cut: the choice then knows nothing of the question, and `keep` is the first cut.
    layer: int >= 1, decoder layer at whose input the second cut is made, ranked by the layer before it; None: 11 of 32,
    in proportion.
    inner_keep: share of the tokens that the second cut keeps.

    Source: Huang et al., "PruneVid: Visual Token Pruning for Efficient Video Large Language Models", from its formulas
    alone.

    Differs from the paper: counts are exact, in proportion to what its rule gives scenes and frames; where more is kept
    than merging leaves, the still tokens least similar to the one before stay by themselves; a cluster stands where its
    centre stood; the second cut leaves the caches of the layers before it as they are. A video of fewer than four
    frames is one scene.
    """

    asks_device: ClassVar[bool] = True
    depth: ClassVar[float] = 11 / 32

    threshold: Annotated[float, Ge(-1), Le(1)] = 0.8
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.4

    def build_second_cut(self, layer: int) -> Pruner:
        return _InnerPruneVid(layer)

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        mask, most = videos.mask, max(videos.keep)
        ends = self._scenes(videos)
        still = self._still(videos, find_first_frames(ends))
        places = StaticPatches.from_segments(videos, ends, still, same_place(videos.x, mask))
        heads, moving = places.heads, places.moving
        sizes = torch.stack([heads.sum(2), moving.sum(2)], dim=2)  # [V, F, 2]: of each frame, still before moving
        room = videos.budget - places.unmerged.sum((1, 2))
        half = torch.where(sizes > _WHOLE, sizes // 2, sizes)
        # One each beforehand: with as many as the rule gives in all, each part has what the rule gives it.
        numbers = shares((half - 1).flatten(1), room, sizes.flatten(1), least=1).view_as(sizes)

        _, of = cluster_frames(places.compute_means(), heads, numbers[..., 0], most, capped=False)
        part = 1 / (gather_flat(count_members(of, heads), of) * places.count_merged()).clamp(min=1).float()
        _, into = cluster_frames(videos.x, moving, numbers[..., 1], most, capped=False)
        weight = 1 / gather_flat(count_members(into, moving), into).clamp(min=1).float()
        into = torch.where(places.unmerged, flat_indices(mask), torch.where(places.mask, places.expand(of), into))
        weight = torch.where(places.unmerged, 1.0, torch.where(places.mask, places.expand(part), weight))

        # After the cut a scene's still tokens are one group, and each frame's others.
        frame = torch.arange(mask.shape[1], device=mask.device)[:, None]
        self._remember(videos, torch.where(places.mask, 2 * places.first.unsqueeze(-1), 2 * frame + 1))
        return into, weight

    def _remember(self, videos: Videos, group: torch.Tensor) -> None:
        """Tell the second cut the group of each token, long `[V, F, P]`; what is in no video's frame is of the first
        one."""
        tokens = videos.tokens
        whole = torch.zeros_like(tokens.mask, dtype=torch.long)
        rows = to_device(videos.segments, whole.device)
        tokens.remember("group", whole.index_copy(0, rows, videos.by_token(group)), per_token=True)
        tokens.remember("groups", 2 * group.shape[1])

    def _scenes(self, videos: Videos) -> torch.Tensor:
        """bool `[V, F - 1]`: whether a scene ends after each frame, also where a video does."""
        real = videos.sizes > 0
        means = frame_means(videos.x, videos.mask)
        wanted = [max(1, int(_SEGMENTS * len(sizes))) for sizes in videos.frames]
        number = to_device(wanted, real.device)
        centres = peaks(means, real, number, max(wanted), _NEIGHBOURS, capped=False)
        labels = nearest(means, real, centres, max(wanted)).tolist()
        frames = real.shape[1]
        ends = [
            [*find_scene_ends(of[: len(sizes)]), *[True] * frames][: frames - 1]
            for of, sizes in zip(labels, videos.frames, strict=True)
        ]
        return to_device(torch.tensor(ends, dtype=torch.bool, device="cpu").view(len(real), -1), real.device)

    def _still(self, videos: Videos, first: torch.Tensor) -> torch.Tensor:
        """bool `[V, F, P]`: tokens at places that stand still in their scene. first: long `[V, F]`."""
        direction = unit(videos.x)
        own = sum_segments(direction.square().sum(-1), first)
        pairs = sum_segments(direction, first).square().sum(-1) - own
        length = sum_segments(videos.mask.long(), first)
        alike = pairs / (length * (length - 1)).clamp(min=1)
        still = (alike > self.threshold) & (length > 1)
        return videos.mask & still.gather(1, first.unsqueeze(-1).expand_as(still))


def find_scene_ends(labels: Sequence[int]) -> list[bool]:
    """Return whether a scene ends after each frame but the last: of each label its longest runs stay (none, where they
    are of one frame), and every stretch of other frames joins the longer of the runs beside it, one after the other; of
    equal ones the earlier. Runs of one label that touch then are one."""
    of_frame = find_runs(labels)
    longest = {label: max(length for own, length in of_frame if own == label) for label in set(labels)}
    kept = [label if length == longest[label] > 1 else None for label, length in of_frame for _ in range(length)]
    runs, index = [[label, length] for label, length in find_runs(kept)], 0
    while index < len(runs):
        if runs[index][0] is not None or len(runs) == 1:
            index += 1
            continue
        beside = [one for one in (index - 1, index + 1) if 0 <= one < len(runs)]
        runs[index][0] = runs[max(beside, key=lambda one: (runs[one][1], -one))][0]
        of_frame = find_runs([label for label, length in runs for _ in range(length)])
        runs, index = [[label, length] for label, length in of_frame], 0
    return [end for _, length in runs for end in [*[False] * (length - 1), True]][:-1]


def find_runs(labels: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return (label, length) of each run of equal labels."""
    return [(label, len([*run])) for label, run in groupby(labels)]


@dataclass(frozen=True)
class _InnerPruneVid(Pruner):
    """The second cut: of each group keep what some head of some text token attends to most in the layer before.

    layer: where it cuts.
    """

    layer: int

    query_aware: ClassVar[bool] = True
    name: ClassVar[str] = "prunevid"
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"text_attention"})

    def select(self, tokens: VisualTokens) -> Selection:
        rows = tokens.text_attention
        # Without text after the video all tokens are alike.
        score = rows.amax((1, 2)) if rows.shape[2] else torch.zeros_like(tokens.mask, dtype=torch.float32)
        groups = tokens.carry.get("groups", 1)
        group = tokens.carry.get("group", torch.zeros_like(tokens.mask, dtype=torch.long))
        group = group.masked_fill(~tokens.mask, groups)
        number = torch.zeros(len(group), groups + 1, dtype=torch.long, device=group.device)
        number = number.scatter_add(1, group, tokens.mask.long())
        share = shares(number, tokens.budget, number)
        keep = rank_in_group(group, score.nan_to_num(nan=-torch.inf)) < share.gather(1, group)
        return Selection(keep, counts=tokens.keep)
