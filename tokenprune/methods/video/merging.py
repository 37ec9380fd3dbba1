# SPDX-License-Identifier: Apache-2.0
"""Parts of the methods that merge tokens of videos: their base, still places, and the attention of the tower."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Gt, Lt

from tokenprune.budgets import Budget
from tokenprune.budgets.schedule import profile
from tokenprune.kernels.clusters import peaks_and_members
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import shares
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import Method, Pruner, Selection
from tokenprune.selection.tokens import VisualTokens
from tokenprune.selection.videos import Videos


@dataclass(frozen=True)
class VideoMerger(Pruner):
    """Base of the methods that merge tokens of videos by comparing frames; a subclass implements `merge`.

    Register it with `needs=("frames", ...)` and `merges=True`. It sees those videos alone of which something has to go;
    images beside them, and tokens after the last frame (the newline of LLaVA-OneVision), stay.
    """

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return which token absorbs each, long `[V, F, P]`, and the weight of each in the mean, float `[V, F, P]` or
        None (equal).

        A token is named by its spot, frame * P + place; one that stays is its own, -1 is dropped. Exactly
        `videos.budget` of each video stay.
        """
        raise NotImplementedError(f"{type(self).__name__} implements neither merge() nor select()")

    def select(self, tokens: VisualTokens) -> Selection:
        """Return which visual tokens stay, and into which the others are merged."""
        videos = Videos.of(tokens)
        if videos is None:
            return Selection(tokens.mask, counts=tokens.keep)
        into, weight = self.merge(videos)
        keep = videos.kept((into == flat_indices(into)) & videos.mask)
        index = torch.arange(keep.shape[1], device=keep.device).expand_as(keep)
        token_index, _ = videos.by_frame(index)
        target = token_index.flatten(1).gather(1, into.clamp(min=0).flatten(1)).view_as(into).masked_fill(into < 0, -1)
        inside = videos.by_token(torch.ones_like(into)) > 0
        rows = to_device(videos.segments, keep.device)
        assign = torch.where(keep, index, -1)
        assign = assign.index_copy(0, rows, torch.where(inside, videos.by_token(target), assign[rows]))
        if weight is not None:
            # What stands alone is copied, whatever it weighs.
            own = torch.where(inside, videos.by_token(weight.float()), 1)
            weight = torch.ones(keep.shape, dtype=torch.float32, device=keep.device).index_copy(0, rows, own)
        return Selection(keep, assign, weight, counts=None if self.by_content_count else tokens.keep)


@dataclass(frozen=True)
class TwoCutMerger(VideoMerger):
    """Base of those that cut once more inside the decoder; a subclass implements `second_cut` too.

    depth: where the second cut is, as a share of the decoder's layers, if no `layer` is given.
    inner, layer, inner_keep: the options of the second cut; each method says what they mean for it.
    """

    query_free: ClassVar[Mapping[str, Any]] = {"inner": False}
    depth: ClassVar[float]

    inner: bool = True
    layer: Annotated[int, Ge(1)] | None = None
    inner_keep: Annotated[float, Gt(0), Lt(1)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        said = self.layer is None or self.inner
        self._check(said, f"layer={self.layer} is of the second cut: leave it out, or inner=False")

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
        early, late = profile(layers, ((0, 1.0), (self.layer or self.depth, self.inner_keep)), budget)
        return [(first, early.budget), (self.build_second_cut(late.layer), late.budget)]


def merge_dropped(selection: Selection, tokens: VisualTokens) -> Selection:
    """Return a choice that drops once each token that it drops is merged into the most similar one that stays."""
    place = partition(selection.keep)[:, : max(tokens.keep)]
    allowed = selection.keep.gather(1, place)
    chosen = gather_tokens(tokens.hidden, place, 1)
    likest = place.gather(1, best_match(tokens.hidden, chosen, allowed)[1])
    itself = torch.arange(likest.shape[1], device=likest.device)
    assign = torch.where(selection.keep, itself, likest).masked_fill(~tokens.mask, -1)
    return dataclasses.replace(selection, assign=assign)


def flat_indices(like: torch.Tensor) -> torch.Tensor:
    """long `[F, P]`: the spot of each token of a video; like: `[V, F, P]`."""
    return torch.arange(like.shape[1] * like.shape[2], device=like.device).view(like.shape[1:])


def get_tower_attention(videos: Videos) -> torch.Tensor:
    """float32 `[V, F, P]`: attention that tokens get in the last block of the vision tower that the model reads, mean
    over heads; 0 for padding, and where it is not finite."""
    attention = videos.tokens.encoder_attention(-1).mean(1)
    return videos.by_frame(attention)[0].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True, eq=False)
class StaticPatches:
    """Places of a video at which nothing changes within a segment: their tokens become one, the first.

    Where a video keeps more tokens than would be left then, those tokens stay by themselves that are least similar to
    the one before (`alone`).

    ends:  bool `[V, F - 1]`, whether a segment ends after each frame.
    still: bool `[V, F, P]`, tokens at still places of their segment, all its frames or none; never of a segment of one
           frame, never padding.
    alone: bool `[V, F, P]`, tokens at still places that stay all the same.
    """

    videos: Videos
    first: torch.Tensor  # long [V, F], the first frame of each frame's segment
    mask: torch.Tensor
    unmerged: torch.Tensor

    @staticmethod
    def from_segments(
        videos: Videos, ends: torch.Tensor, static: torch.Tensor, similarity: torch.Tensor
    ) -> StaticPatches:
        """similarity: float `[V, F - 1, P]`, of each token to the one before at its place."""
        first = find_first_frames(ends)
        index = torch.arange(first.shape[1], device=first.device)
        later = static & (first != index).unsqueeze(-1)
        left = (videos.mask & ~later).sum((1, 2))
        room = (videos.budget - left).clamp(min=0)
        change = torch.cat([torch.zeros_like(similarity[:, :1]), -similarity], dim=1) if static.shape[1] > 1 else static
        unmerged = top_mask(change.float().flatten(1), later.flatten(1), room, max(videos.keep)).view_as(static)
        return StaticPatches(videos, first, static & ~unmerged, unmerged)

    @property
    def heads(self) -> torch.Tensor:
        """bool `[V, F, P]`: the first token of each still place."""
        index = torch.arange(self.first.shape[1], device=self.first.device)
        return self.mask & (self.first == index).unsqueeze(-1)

    @property
    def moving(self) -> torch.Tensor:
        """bool `[V, F, P]`: tokens at other places."""
        return self.videos.mask & ~self.mask & ~self.unmerged

    def count_merged(self) -> torch.Tensor:
        """long `[V, F, P]`: of how many tokens each still place consists, at its first token."""
        return sum_segments(self.mask.long(), self.first) * self.heads

    def compute_means(self) -> torch.Tensor:
        """float32 `[V, F, P, D]`: the mean over time of each still place, at the first; zeros elsewhere."""
        total = sum_segments(self.videos.x.masked_fill(~self.mask.unsqueeze(-1), 0), self.first)
        return total.masked_fill(~self.heads.unsqueeze(-1), 0) / self.count_merged().clamp(min=1).unsqueeze(-1)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Return `[V, F, P]`: to each frame what `values` `[V, F, P]` has at the first frame of its segment."""
        return values.gather(1, self.first.unsqueeze(-1).expand_as(values))


def find_first_frames(ends: torch.Tensor) -> torch.Tensor:
    """long `[V, F]`: the first frame of the segment that each frame is of. ends: bool `[V, F - 1]`."""
    index = torch.arange(ends.shape[1] + 1, device=ends.device)
    starts = torch.cat([torch.ones_like(ends[:, :1]) if ends.shape[1] else ends.new_ones(len(ends), 1), ends], dim=1)
    return torch.where(starts, index, 0).cummax(1).values


def sum_segments(values: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return `[V, F, ...]`: at the first frame of each segment the sum of `values` `[V, F, ...]` over its frames, added
    in the same order each time; elsewhere the sum over what is left of it. first: long `[V, F]`, see `first_frames`."""
    total = values.clone()
    shape = [len(values), *[1] * (values.ndim - 2)]
    for frame in range(values.shape[1] - 2, -1, -1):
        goes_on = (first[:, frame] == first[:, frame + 1]).view(shape)
        total[:, frame] += torch.where(goes_on, total[:, frame + 1], 0)
    return total


def split_in_segments(
    weight: torch.Tensor, total: torch.Tensor, most: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """long `[V, F]`: split in each segment what `total` (long `[V, F]`) has at its first frame among its frames; see
    `shares`, at least one each where it suffices. weight, most: `[V, F]`."""
    frames = first.shape[1]
    own = first.unsqueeze(1) == torch.arange(frames, device=first.device)[:, None]  # [V, segment, frame]
    weight, most = ((own * one.unsqueeze(1)).flatten(0, 1) for one in (weight, most))
    return shares(weight, total.flatten(), most, least=1).view_as(own).sum(1)


def cluster_frames(
    x: torch.Tensor, mask: torch.Tensor, number: torch.Tensor, most: int, capped: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cluster tokens `[V, F, P, D]` of `mask` (bool `[V, F, P]`) in each frame: bool `[V, F, P]`, the centres, and long
    `[V, F, P]`, the spot of each token's; -1 where there is none. number: long `[V, F]`, how many centres. capped: see
    `density_peaks`."""
    frames, places = mask.shape[1:]
    x, mask, number = x.flatten(0, 1), mask.flatten(0, 1), number.flatten()
    peaks, member = peaks_and_members(x, mask, number, min(most, places), capped)
    start = torch.arange(frames, device=mask.device).unsqueeze(-1) * places
    member = member.view(-1, frames, places)
    return peaks.view_as(member), torch.where(member < 0, -1, start + member)


def count_members(into: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """long `[V, F, P]`: how many of the tokens of `mask` (bool `[V, F, P]`) go into each. into: spots, -1 is none."""
    flat, there = into.flatten(1), (mask & (into >= 0)).flatten(1)
    number = torch.zeros_like(flat).scatter_add(1, flat.clamp(min=0), there.long())
    return number.view_as(into)


def gather_flat(values: torch.Tensor, spot: torch.Tensor) -> torch.Tensor:
    """Return `[V, F, P]`: the values `[V, F, P]` at spots, long `[V, F, P]`; those at -1 are of no meaning."""
    return values.flatten(1).gather(1, spot.clamp(min=0).flatten(1)).view_as(spot)
