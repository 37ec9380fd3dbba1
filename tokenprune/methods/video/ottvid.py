# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from annotated_types import Gt

from tokenprune.kernels.clusters import covering, roots
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.masses import evenly, transport
from tokenprune.kernels.pairs import unit
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import same_place, shares_in_rounds
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger, flat_indices, get_tower_attention
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_WITHIN_FRAMES = 0.3  # of the reduction, on a logarithmic scale
_TEMPERATURE = 0.3


@register(
    "ottvid", site=Site.PRE_LLM, needs=("frames", "encoder_attention"), paper="arXiv 2605.11803", merges=True
)  # fmt: skip
@dataclass(frozen=True)
class OTTVid(VideoMerger):
    """Pick the tokens of each frame that stand for the others, and merge those of neighbouring frames along an optimal
    transport between them (OTT-Vid).

    The picks of a frame cover it: each token is as well covered as it is similar to the nearest pick, and counts as
    much as the vision tower attends to it. The transport from a frame to the next carries more mass between picks whose
    frame could do without them; what costs least to carry merges first, and pairs of frames with little to carry give
    up more tokens. A pair keeps at least one pick of its later frame, and its surplus is shared again, by the same
    weights, among the pairs with room. A pick that merges goes into that of the earlier frame, or, where that is too
    unlike, it is dropped with all that merged into it.

    threshold: cost above which a pick is dropped and not merged.

    Source: "OTT-Vid", arXiv 2605.11803, and the authors' code.

    Differs from the paper: where the share of a frame that its rule gives cannot lead to the number that is to be kept
    (few tokens a frame, or nearly all), a frame has as many picks as can; of fewer tokens than frames, frames may lose
    all of theirs. Rows and columns of the grid count from 0 to 1 at their ends.
    """

    threshold: Annotated[float, Gt(0)] = 0.3

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = videos.mask
        number = [count_picks(keep, frames) for keep, frames in zip(videos.keep, videos.frames, strict=True)]
        picks = self._picks(videos, number)
        spot = flat_indices(mask)
        scratch = spot.numel()  # where what is dropped ends
        parent = torch.arange(scratch + 1, device=mask.device).repeat(len(mask), 1)
        if mask.shape[1] > 1:
            joins, target = self._joins(videos, picks, number)
            source = picks.spot[:, 1:].masked_fill(~joins, scratch)
            parent = parent.scatter(
                1, source.flatten(1), torch.where(joins & (target >= 0), target, scratch).flatten(1)
            )
        root = roots(parent, mask.shape[1])[:, :-1].view_as(mask)
        return torch.where(picks.mask & (root < scratch), root, -1), None

    def _picks(self, videos: Videos, number: list[int]) -> _Picks:
        """Choose so many tokens of each frame of each video. number: of each video."""
        x, mask, attention = (one.flatten(0, 1) for one in (videos.x, videos.mask, get_tower_attention(videos)))
        attention = attention.clamp(min=0).masked_fill(~mask, 0)
        whole = attention.sum(1, keepdim=True)
        weight = torch.where(whole > 0, attention / whole.clamp(min=1e-30), evenly(mask))
        most = max(number)
        wanted = torch.minimum(to_device(number, mask.device)[:, None], videos.sizes)
        picked = covering(x, mask, weight, wanted.flatten(), most)
        place = partition(picked)[:, :most]
        there, chosen = picked.gather(1, place), gather_tokens(x, place, 1)
        mass = (-_missed(x, weight, chosen, there) / _TEMPERATURE).masked_fill(~there, -torch.inf).log_softmax(1)
        by_frame = (*videos.mask.shape[:2], most)
        start = torch.arange(by_frame[1], device=mask.device)[:, None] * mask.shape[1]
        return _Picks(
            picked.view_as(videos.mask),
            place.view(by_frame) + start,
            there.view(by_frame),
            chosen.view(*by_frame, -1),
            mass.view(by_frame),
        )

    def _joins(self, videos: Videos, picks: _Picks, number: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which picks merge into the previous frame, bool `[V, F - 1, k]`, and the index of the pick that each
        one merges into, -1 where it is dropped."""
        cost = self._cost(videos, picks)
        there = picks.there[:, 1:] & picks.there[:, :-1]
        real = there.any(2)
        # Frames that are not there are made alike ones, so that nothing of them is infinite.
        mass = picks.mass.masked_fill(~picks.there.any(2, keepdim=True), 0)
        plan = transport(cost.flatten(0, 1), mass[:, :-1].flatten(0, 1), mass[:, 1:].flatten(0, 1)).view_as(cost)
        work = (plan * cost).sum((2, 3))
        weight = (-work / _TEMPERATURE).masked_fill(~real, -torch.inf).softmax(1).nan_to_num(nan=0.0)
        few = [k - (keep >= len(of)) for k, keep, of in zip(number, videos.keep, videos.frames, strict=True)]
        room = torch.minimum(to_device(few, real.device)[:, None], picks.there[:, 1:].sum(2)) * real
        gone = picks.mask.sum((1, 2)) - videos.budget
        merges = shares_in_rounds(weight, gone, room)

        best, earlier = plan.masked_fill(~picks.there[:, :-1].unsqueeze(-1), -1).max(2)
        joins = top_mask(best.flatten(0, 1), picks.there[:, 1:].flatten(0, 1), merges.flatten(), best.shape[2])
        target = picks.spot[:, :-1].gather(2, earlier)
        dear = cost.gather(2, earlier.unsqueeze(2)).squeeze(2) > self.threshold
        return joins.view_as(best), target.masked_fill(dear, -1)

    def _cost(self, videos: Videos, picks: _Picks) -> torch.Tensor:
        """float32 `[V, F - 1, k, k]`: what it costs to carry mass from a pick to one of the next frame: how unlike they
        are, and, the more alike the frames are, how far apart."""
        both = videos.mask[:, 1:] & videos.mask[:, :-1]
        alike = same_place(videos.x, videos.mask).sum(2) / both.sum(2).clamp(min=1)
        alpha = (0.5 + 0.5 * (1 - alike).clamp(0, 1))[..., None, None]
        direction = unit(picks.x)
        unlike = 1 - (direction[:, :-1] @ direction[:, 1:].transpose(2, 3)).clamp(0, 1)
        patches = videos.tokens.patches
        sides = [
            (place.float() / (size - 1).clamp(min=1)).clamp(min=0)
            for place, size in ((patches.row, patches.height), (patches.column, patches.width))
        ]
        where, _ = videos.by_frame(torch.stack(sides, dim=-1))
        where = where.flatten(1, 2).gather(1, picks.spot.flatten(1).unsqueeze(-1).expand(-1, -1, 2))
        where = where.view(*picks.spot.shape, 2)
        apart = torch.cdist(where[:, :-1], where[:, 1:], compute_mode="donot_use_mm_for_euclid_dist") / 2**0.5
        return alpha * unlike + (1 - alpha) * apart


class _Picks(NamedTuple):
    """The picks of each frame, k at most: mask, bool `[V, F, P]`; spot, long `[V, F, k]`; there, bool `[V, F, k]`,
    False for padding; x, float32 `[V, F, k, D]`; mass, `[V, F, k]`, the logarithm of each one's part of its frame."""

    mask: torch.Tensor
    spot: torch.Tensor
    there: torch.Tensor
    x: torch.Tensor
    mass: torch.Tensor


def count_picks(keep: int, frames: list[int]) -> int:
    """Return how many tokens of each frame are picked, of which `keep` of the video are to be left. frames: how many
    tokens each has."""
    count, tokens = len(frames), sum(frames)
    if count == 1:
        return keep
    if keep <= count:
        return 1
    wanted = int(max(frames) * (keep / tokens) ** (1 - _WITHIN_FRAMES) + 1e-9)
    # As many at least as are to be left, and so few that frames after the first need not lose all.
    return min(max(wanted, -(-keep // count)), keep - count + 1)


def _missed(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """float32 `[R, k]`: how much worse a frame would be covered without each pick, the most of any pick as 1.

    x: `[R, P, D]`; weight: float `[R, P]`; chosen: `[R, k, D]`; there: bool `[R, k]`.
    """
    alike = (unit(x) @ unit(chosen).transpose(1, 2)).masked_fill(~there.unsqueeze(1), -2)
    first, which = alike.max(2)
    second = alike.scatter(2, which.unsqueeze(2), -2).amax(2)
    loss = weight * (first.clamp(min=0) - second.clamp(min=0))
    index = torch.arange(chosen.shape[1], device=x.device)
    lost = (loss.unsqueeze(2) * (which.unsqueeze(2) == index)).sum(1)
    return lost / lost.amax(1, keepdim=True).clamp(min=1e-30)
