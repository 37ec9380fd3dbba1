# SPDX-License-Identifier: Apache-2.0
"""Base classes and helpers of the methods that merge tokens of videos.

Shapes: V videos, F frames, P patches per frame, D channels. The flat index of a token is frame * P + patch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import plan_cuts
from tokenprune.kernels.clusters import cluster_density_peaks
from tokenprune.kernels.match import match_selected
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import split_budget
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import Method, Pruner, Selection
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos


@dataclass(frozen=True)
class VideoMerger(Pruner):
    """Base class of methods that merge tokens across the frames of a video. Subclasses implement `merge`.

    Register a subclass with `needs=("frames", ...)` and `merges=True`. It receives only the videos that have to drop
    tokens. Images in the same prompt, and tokens after the last frame (the newline of LLaVA-OneVision), are kept.

    Examples:
        >>> class KeepLongest(VideoMerger):
        ...     def merge(self, videos):
        ...         keep = videos.top(videos.x.norm(dim=-1))
        ...         return torch.where(keep, flat_indices(keep), -1), None
    """

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the token that absorbs each token, and its weight. Each video keeps exactly `videos.budget` tokens.

        Args:
            videos: Tokens by frame.

        Returns:
            Flat index of the absorbing token, shape (V, F, P), int64: a kept token has its own index, a dropped token
            -1. Weight of each token in the mean, shape (V, F, P), float, or None for equal weights.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither merge() nor select()")

    def select(self, tokens: VisualTokens) -> Selection:
        """Convert the result of `merge` to a selection over all segments."""
        videos = Videos.from_tokens(tokens)
        if videos is None:
            return Selection(tokens.mask, counts=tokens.keep)
        target, weight = self.merge(videos)
        keep = videos.to_token_mask((target == flat_indices(target)) & videos.mask)
        index = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
        token_index, _ = videos.group_by_frame(index)
        token_target = token_index.flatten(1).gather(1, target.clamp(min=0).flatten(1)).view_as(target)
        token_target = token_target.masked_fill(target < 0, -1)
        in_frame = videos.ungroup(torch.ones_like(target)) > 0
        rows = to_device(videos.segments, keep.device)
        assignment = torch.where(keep, index, -1)
        assignment = assignment.index_copy(
            0, rows, torch.where(in_frame, videos.ungroup(token_target), assignment[rows])
        )
        if weight is not None:
            # A token that absorbs no other token is copied unchanged, so its weight does not matter.
            token_weight = torch.where(in_frame, videos.ungroup(weight.float()), 1)
            weight = torch.ones(keep.shape, dtype=torch.float32, device=keep.device).index_copy(0, rows, token_weight)
        return Selection(keep, assignment, weight, counts=None if self.chooses_count else tokens.keep)


@dataclass(frozen=True)
class TwoCutMerger(VideoMerger):
    """Base class of video mergers that cut again inside the decoder. Subclasses also implement `build_second_cut`.

    `depth` is the default layer of the second cut, as a share of the decoder's layers.

    Args:
        inner: True to make a second cut inside the decoder. False to merge only before the decoder.
        layer: Decoder layer of the second cut. None: use `depth`.
        inner_keep: Share of the tokens that the second cut keeps.
    """

    query_free: ClassVar[Mapping[str, Any]] = {"inner": False}
    depth: ClassVar[float]

    inner: bool = True
    layer: Annotated[int, Ge(1)] | None = None
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        is_consistent = self.layer is None or self.inner
        self._check(is_consistent, f"layer={self.layer} sets the second cut, but inner=False. Pass only one.")

    @property
    def query_aware(self) -> bool:
        return self.inner

    def build_second_cut(self, layer: int) -> Pruner:
        """Return the method that cuts at decoder layer `layer`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement build_second_cut()")

    def stages(self, budget: Budget, layers: int) -> list[tuple[Method, Budget]]:
        first = dataclasses.replace(self, inner=False, layer=None)
        if not self.inner:
            return [(first, budget)]
        early, late = plan_cuts(layers, ((0, 1.0), (self.layer or self.depth, self.inner_keep)), budget)
        return [(first, early.budget), (self.build_second_cut(late.layer), late.budget)]


def merge_dropped(selection: Selection, tokens: VisualTokens) -> Selection:
    """Merge each dropped token of a selection into the most similar kept token."""
    most_similar = match_selected(tokens.hidden, selection.keep, max(tokens.keep))
    token_index = torch.arange(most_similar.shape[1], device=most_similar.device)
    assignment = torch.where(selection.keep, token_index, most_similar).masked_fill(~tokens.mask, -1)
    return dataclasses.replace(selection, assign=assignment)


def flat_indices(like: torch.Tensor) -> torch.Tensor:
    """Return the flat index of each token of a video, shape (F, P). `like` is any tensor (V, F, P)."""
    return torch.arange(like.shape[1] * like.shape[2], device=like.device).view(like.shape[1:])


def get_tower_attention(videos: Videos) -> torch.Tensor:
    """Return the attention that each token receives in the last block of the vision tower that the model reads.

    Returns:
        Mean over heads, shape (V, F, P), float32. Padding and non-finite values are 0.
    """
    attention = videos.tokens.encoder_attention(-1).mean(1)
    return videos.group_by_frame(attention)[0].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, eq=False)
class StaticPatches:
    """Patches of a video that do not change within a segment. Their tokens merge into the token of the first frame.

    If merging leaves fewer tokens than the budget, the static tokens least similar to their predecessor stay unmerged.

    Attributes:
        videos: Tokens by frame.
        first: First frame of each frame's segment, shape (V, F), int64.
        mask: Merged tokens of static patches, shape (V, F, P), bool. Segments of one frame have none.
        unmerged: Tokens of static patches that stay unmerged, shape (V, F, P), bool.
    """

    videos: Videos
    first: torch.Tensor
    mask: torch.Tensor
    unmerged: torch.Tensor

    @staticmethod
    def from_segments(
        videos: Videos, ends: torch.Tensor, static: torch.Tensor, similarity: torch.Tensor
    ) -> StaticPatches:
        """Find the unmerged tokens and return the static patches.

        Args:
            videos: Tokens by frame.
            ends: Whether a segment ends after each frame, shape (V, F - 1), bool.
            static: Tokens of static patches, shape (V, F, P), bool.
            similarity: Cosine of each token to the same patch of the previous frame, shape (V, F - 1, P).
        """
        first = find_first_frames(ends)
        index = torch.arange(first.shape[1], device=first.device)
        is_later = static & (first != index).unsqueeze(-1)
        num_left = (videos.mask & ~is_later).sum((1, 2))
        room = (videos.budget - num_left).clamp(min=0)
        change = torch.cat([torch.zeros_like(similarity[:, :1]), -similarity], dim=1) if static.shape[1] > 1 else static
        unmerged = top_mask(change.float().flatten(1), is_later.flatten(1), room, max(videos.keep)).view_as(static)
        return StaticPatches(videos, first, static & ~unmerged, unmerged)

    @property
    def heads(self) -> torch.Tensor:
        """First token of each static patch, shape (V, F, P), bool."""
        index = torch.arange(self.first.shape[1], device=self.first.device)
        return self.mask & (self.first == index).unsqueeze(-1)

    @property
    def moving(self) -> torch.Tensor:
        """Tokens of all other patches, shape (V, F, P), bool."""
        return self.videos.mask & ~self.mask & ~self.unmerged

    def count_merged(self) -> torch.Tensor:
        """Return the number of tokens of each static patch at its first token, shape (V, F, P), int64."""
        return sum_segments(self.mask.long(), self.first) * self.heads

    def compute_means(self) -> torch.Tensor:
        """Return the mean over time of each static patch at its first token, shape (V, F, P, D); zeros elsewhere."""
        total = sum_segments(self.videos.hidden.masked_fill(~self.mask.unsqueeze(-1), 0), self.first)
        return total.masked_fill(~self.heads.unsqueeze(-1), 0) / self.count_merged().clamp(min=1).unsqueeze(-1)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast values (V, F, P) from the first frame of each segment to all its frames."""
        return values.gather(1, self.first.unsqueeze(-1).expand_as(values))


def find_first_frames(ends: torch.Tensor) -> torch.Tensor:
    """Return the first frame of each frame's segment, shape (V, F), int64. `ends` (V, F - 1) marks segment ends."""
    index = torch.arange(ends.shape[1] + 1, device=ends.device)
    starts = torch.cat([torch.ones_like(ends[:, :1]) if ends.shape[1] else ends.new_ones(len(ends), 1), ends], dim=1)
    return torch.where(starts, index, 0).cummax(1).values


def sum_segments(values: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Sum values (V, F, ...) over the frames of each segment, at its first frame, in a fixed order.

    Other frames hold the sum over the rest of their segment. `first` is the result of `find_first_frames`.
    """
    total = values.clone()
    shape = [len(values), *[1] * (values.ndim - 2)]
    for frame in range(values.shape[1] - 2, -1, -1):
        continues = (first[:, frame] == first[:, frame + 1]).view(shape)
        total[:, frame] += torch.where(continues, total[:, frame + 1], 0)
    return total


def split_in_segments(
    weight: torch.Tensor, total: torch.Tensor, capacity: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """Split the total at the first frame of each segment among its frames, shape (V, F), int64.

    See `split_budget`: the split is proportional to `weight`, with at least one each if the total suffices.
    """
    frames = first.shape[1]
    is_member = first.unsqueeze(1) == torch.arange(frames, device=first.device)[:, None]  # [V, segment, frame]
    weight, capacity = ((is_member * tensor.unsqueeze(1)).flatten(0, 1) for tensor in (weight, capacity))
    return split_budget(weight, total.flatten(), capacity, min_tokens=1).view_as(is_member).sum(1)


def cluster_frames(
    x: torch.Tensor, mask: torch.Tensor, num_clusters: torch.Tensor, max_clusters: int, capped: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster the tokens of each frame by density peaks (DPC-KNN).

    Args:
        x: Tokens, shape (V, F, P, D).
        mask: Clustered tokens, shape (V, F, P), bool.
        num_clusters: Clusters per frame, shape (V, F), int64.
        max_clusters: Maximum number of clusters of a frame.
        capped: See `cluster_density_peaks`.

    Returns:
        Mask of the centres, and the flat index of each token's centre (-1 if there is none), both (V, F, P).
    """
    frames, num_patches = mask.shape[1:]
    x, mask, num_clusters = x.flatten(0, 1), mask.flatten(0, 1), num_clusters.flatten()
    peaks, member = cluster_density_peaks(x, mask, num_clusters, min(max_clusters, num_patches), capped)
    start = torch.arange(frames, device=mask.device).unsqueeze(-1) * num_patches
    member = member.view(-1, frames, num_patches)
    return peaks.view_as(member), torch.where(member < 0, -1, start + member)


def count_members(target: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of `mask` that merge into each token, shape (V, F, P), int64."""
    flat, is_merged = target.flatten(1), (mask & (target >= 0)).flatten(1)
    counts = torch.zeros_like(flat).scatter_add(1, flat.clamp(min=0), is_merged.long())
    return counts.view_as(target)


def gather_flat(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Gather values (V, F, P) at flat indices (V, F, P). Entries at index -1 are undefined."""
    return values.flatten(1).gather(1, index.clamp(min=0).flatten(1)).view_as(index)
