# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from annotated_types import Gt

from tokenprune.kernels.clusters import facility_location, find_roots
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.masses import optimal_transport, uniform_weights
from tokenprune.kernels.pairs import normalize
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.temporal import previous_frame_similarity, split_budget_in_rounds
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger, flat_indices, get_tower_attention
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_WITHIN_FRAMES = 0.3  # share of the reduction between frames, on a logarithmic scale
_TEMPERATURE = 0.3


@register(
    "ottvid", site=Site.PRE_LLM, needs=("frames", "encoder_attention"), paper="arXiv 2605.11803", merges=True
)  # fmt: skip
@dataclass(frozen=True)
class OTTVid(VideoMerger):
    """Pick representative tokens and merge them between frames by optimal transport (OTT-Vid).

    The picks of a frame cover its tokens: a token is covered by its similarity to the nearest pick and weighted by its
    attention in the vision tower. Optimal transport moves mass from the picks of a frame to the picks of the next;
    picks that the frame can spare carry more mass. Pairs with the largest transported mass merge first, and frame pairs
    with a low transport cost give up more tokens. A merged pick joins the pick of the earlier frame. If the two are too
    different, it is dropped with all tokens that merged into it. A pair keeps at least one pick of its later frame; its
    surplus is split among the other pairs.

    Args:
        threshold: Transport cost above which a pick is dropped instead of merged.

    Source:
        "OTT-Vid" (arXiv 2605.11803), and the authors' code.

    Differences from the paper:
        - If the paper's number of picks cannot lead to the budget (few tokens per frame, or nearly all), the closest
          feasible number is used. If the budget is below the number of frames, frames may lose all tokens.
        - Row and column coordinates run from 0 to 1 inclusive.

    Example:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, OTTVid(), keep=0.25)
    """

    threshold: Annotated[float, Gt(0)] = 0.3

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = videos.mask
        number = [count_picks(keep, frames) for keep, frames in zip(videos.keep, videos.frames, strict=True)]
        picks = self._picks(videos, number)
        spot = flat_indices(mask)
        scratch = spot.numel()  # index that absorbs dropped tokens
        parent = torch.arange(scratch + 1, device=mask.device).repeat(len(mask), 1)
        if mask.shape[1] > 1:
            joins, target = self._joins(videos, picks, number)
            source = picks.spot[:, 1:].masked_fill(~joins, scratch)
            parent = parent.scatter(
                1, source.flatten(1), torch.where(joins & (target >= 0), target, scratch).flatten(1)
            )
        root = find_roots(parent, mask.shape[1])[:, :-1].view_as(mask)
        return torch.where(picks.mask & (root < scratch), root, -1), None

    def _picks(self, videos: Videos, number: list[int]) -> _Picks:
        """Pick `number[v]` tokens of each frame of video v."""
        x, mask, attention = (one.flatten(0, 1) for one in (videos.hidden, videos.mask, get_tower_attention(videos)))
        attention = attention.clamp(min=0).masked_fill(~mask, 0)
        whole = attention.sum(1, keepdim=True)
        weight = torch.where(whole > 0, attention / whole.clamp(min=1e-30), uniform_weights(mask))
        most = max(number)
        wanted = torch.minimum(to_device(number, mask.device)[:, None], videos.sizes)
        picked = facility_location(x, mask, weight, wanted.flatten(), most)
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
        """Choose the picks that merge into the previous frame.

        Returns:
            Mask of the merging picks, shape (V, F - 1, K), and the flat index of the pick that each joins; -1 if it is
            dropped.
        """
        cost = self._cost(videos, picks)
        there = picks.there[:, 1:] & picks.there[:, :-1]
        real = there.any(2)
        # Give padding frames uniform mass. Their logarithms would be infinite.
        mass = picks.mass.masked_fill(~picks.there.any(2, keepdim=True), 0)
        plan = optimal_transport(cost.flatten(0, 1), mass[:, :-1].flatten(0, 1), mass[:, 1:].flatten(0, 1)).view_as(
            cost
        )
        work = (plan * cost).sum((2, 3))
        weight = (-work / _TEMPERATURE).masked_fill(~real, -torch.inf).softmax(1).nan_to_num(nan=0.0)
        few = [k - (keep >= len(of)) for k, keep, of in zip(number, videos.keep, videos.frames, strict=True)]
        room = torch.minimum(to_device(few, real.device)[:, None], picks.there[:, 1:].sum(2)) * real
        gone = picks.mask.sum((1, 2)) - videos.budget
        merges = split_budget_in_rounds(weight, gone, room)

        best, earlier = plan.masked_fill(~picks.there[:, :-1].unsqueeze(-1), -1).max(2)
        joins = top_mask(best.flatten(0, 1), picks.there[:, 1:].flatten(0, 1), merges.flatten(), best.shape[2])
        target = picks.spot[:, :-1].gather(2, earlier)
        dear = cost.gather(2, earlier.unsqueeze(2)).squeeze(2) > self.threshold
        return joins.view_as(best), target.masked_fill(dear, -1)

    def _cost(self, videos: Videos, picks: _Picks) -> torch.Tensor:
        """Return the transport cost between the picks of neighbouring frames, shape (V, F - 1, K, K), float32.

        It combines dissimilarity and spatial distance. The distance counts more if the frames are similar.
        """
        both = videos.mask[:, 1:] & videos.mask[:, :-1]
        alike = previous_frame_similarity(videos.hidden, videos.mask).sum(2) / both.sum(2).clamp(min=1)
        alpha = (0.5 + 0.5 * (1 - alike).clamp(0, 1))[..., None, None]
        direction = normalize(picks.x)
        unlike = 1 - (direction[:, :-1] @ direction[:, 1:].transpose(2, 3)).clamp(0, 1)
        patches = videos.tokens.patches
        sides = [
            (place.float() / (size - 1).clamp(min=1)).clamp(min=0)
            for place, size in ((patches.row, patches.height), (patches.column, patches.width))
        ]
        where, _ = videos.group_by_frame(torch.stack(sides, dim=-1))
        where = where.flatten(1, 2).gather(1, picks.spot.flatten(1).unsqueeze(-1).expand(-1, -1, 2))
        where = where.view(*picks.spot.shape, 2)
        apart = torch.cdist(where[:, :-1], where[:, 1:], compute_mode="donot_use_mm_for_euclid_dist") / 2**0.5
        return alpha * unlike + (1 - alpha) * apart


class _Picks(NamedTuple):
    """Picks of each frame, at most K.

    Attributes:
        mask: Picked tokens, shape (V, F, P), bool.
        spot: Flat index of each pick, shape (V, F, K), int64.
        there: False for padding, shape (V, F, K), bool.
        x: Tokens, shape (V, F, K, D), float32.
        mass: Logarithm of each pick's share of its frame, shape (V, F, K).
    """

    mask: torch.Tensor
    spot: torch.Tensor
    there: torch.Tensor
    x: torch.Tensor
    mass: torch.Tensor


def count_picks(keep: int, frames: list[int]) -> int:
    """Return the number of picks per frame for a video that keeps `keep` tokens. `frames` are the tokens per frame."""
    count, tokens = len(frames), sum(frames)
    if count == 1:
        return keep
    if keep <= count:
        return 1
    wanted = int(max(frames) * (keep / tokens) ** (1 - _WITHIN_FRAMES) + 1e-9)
    # Enough picks for the budget, and few enough that later frames need not lose all of them.
    return min(max(wanted, -(-keep // count)), keep - count + 1)


def _missed(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the loss of coverage without each pick, relative to the largest loss of the frame, shape (R, K), float32.

    Args:
        x: Tokens of R frames, shape (R, P, D).
        weight: Weight of each token, shape (R, P).
        chosen: Picks, shape (R, K, D).
        there: False for padding, shape (R, K), bool.
    """
    alike = (normalize(x) @ normalize(chosen).transpose(1, 2)).masked_fill(~there.unsqueeze(1), -2)
    first, which = alike.max(2)
    second = alike.scatter(2, which.unsqueeze(2), -2).amax(2)
    loss = weight * (first.clamp(min=0) - second.clamp(min=0))
    index = torch.arange(chosen.shape[1], device=x.device)
    lost = (loss.unsqueeze(2) * (which.unsqueeze(2) == index)).sum(1)
    return lost / lost.amax(1, keepdim=True).clamp(min=1e-30)
