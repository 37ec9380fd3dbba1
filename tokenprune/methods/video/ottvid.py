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

_BETWEEN_FRAMES = 0.3  # part of the reduction that merges between frames achieve, on a logarithmic scale
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

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, OTTVid(), keep=0.25)
    """

    threshold: Annotated[float, Gt(0)] = 0.3

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = videos.mask
        num_picks = [count_picks(keep, frames) for keep, frames in zip(videos.keep, videos.frames, strict=True)]
        picks = self._pick(videos, num_picks)
        index = flat_indices(mask)
        dropped_index = index.numel()  # index that absorbs dropped tokens
        parent = torch.arange(dropped_index + 1, device=mask.device).repeat(len(mask), 1)
        if mask.shape[1] > 1:
            joins, target = self._choose_merges(videos, picks, num_picks)
            source = picks.flat_index[:, 1:].masked_fill(~joins, dropped_index)
            parent = parent.scatter(
                1, source.flatten(1), torch.where(joins & (target >= 0), target, dropped_index).flatten(1)
            )
        root = find_roots(parent, mask.shape[1])[:, :-1].view_as(mask)
        return torch.where(picks.mask & (root < dropped_index), root, -1), None

    def _pick(self, videos: Videos, num_picks: list[int]) -> _Picks:
        """Pick `num_picks[v]` tokens of each frame of video v."""
        x, mask, attention = (
            tensor.flatten(0, 1) for tensor in (videos.hidden, videos.mask, get_tower_attention(videos))
        )
        attention = attention.clamp(min=0).masked_fill(~mask, 0)
        total = attention.sum(1, keepdim=True)
        weight = torch.where(total > 0, attention / total.clamp(min=1e-30), uniform_weights(mask))
        max_picks = max(num_picks)
        requested = torch.minimum(to_device(num_picks, mask.device)[:, None], videos.sizes)
        picked = facility_location(x, mask, weight, requested.flatten(), max_picks)
        index = partition(picked)[:, :max_picks]
        valid, chosen = picked.gather(1, index), gather_tokens(x, index, 1)
        mass = (-_compute_loss(x, weight, chosen, valid) / _TEMPERATURE).masked_fill(~valid, -torch.inf).log_softmax(1)
        frame_shape = (*videos.mask.shape[:2], max_picks)
        start = torch.arange(frame_shape[1], device=mask.device)[:, None] * mask.shape[1]
        return _Picks(
            picked.view_as(videos.mask),
            index.view(frame_shape) + start,
            valid.view(frame_shape),
            chosen.view(*frame_shape, -1),
            mass.view(frame_shape),
        )

    def _choose_merges(self, videos: Videos, picks: _Picks, num_picks: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the picks that merge into the previous frame.

        Returns:
            Mask of the merging picks, shape (V, F - 1, K), and the flat index of the pick that each joins; -1 if it is
            dropped.
        """
        cost = self._compute_cost(videos, picks)
        valid = picks.valid[:, 1:] & picks.valid[:, :-1]
        is_pair = valid.any(2)
        # Give padding frames uniform mass. Their logarithms would be infinite.
        mass = picks.mass.masked_fill(~picks.valid.any(2, keepdim=True), 0)
        plan = optimal_transport(cost.flatten(0, 1), mass[:, :-1].flatten(0, 1), mass[:, 1:].flatten(0, 1))
        plan = plan.view_as(cost)
        work = (plan * cost).sum((2, 3))
        weight = (-work / _TEMPERATURE).masked_fill(~is_pair, -torch.inf).softmax(1).nan_to_num(nan=0.0)
        capacity = [
            k - (budget >= len(frames)) for k, budget, frames in zip(num_picks, videos.keep, videos.frames, strict=True)
        ]
        room = torch.minimum(to_device(capacity, is_pair.device)[:, None], picks.valid[:, 1:].sum(2)) * is_pair
        num_merges = picks.mask.sum((1, 2)) - videos.budget
        merges_per_pair = split_budget_in_rounds(weight, num_merges, room)

        best, earlier = plan.masked_fill(~picks.valid[:, :-1].unsqueeze(-1), -1).max(2)
        joins = top_mask(best.flatten(0, 1), picks.valid[:, 1:].flatten(0, 1), merges_per_pair.flatten(), best.shape[2])
        target = picks.flat_index[:, :-1].gather(2, earlier)
        is_expensive = cost.gather(2, earlier.unsqueeze(2)).squeeze(2) > self.threshold
        return joins.view_as(best), target.masked_fill(is_expensive, -1)

    def _compute_cost(self, videos: Videos, picks: _Picks) -> torch.Tensor:
        """Return the transport cost between the picks of neighbouring frames, shape (V, F - 1, K, K), float32.

        It combines dissimilarity and spatial distance. The distance counts more if the frames are similar.
        """
        is_pair = videos.mask[:, 1:] & videos.mask[:, :-1]
        similarity = previous_frame_similarity(videos.hidden, videos.mask).sum(2) / is_pair.sum(2).clamp(min=1)
        alpha = (0.5 + 0.5 * (1 - similarity).clamp(0, 1))[..., None, None]
        direction = normalize(picks.x)
        dissimilarity = 1 - (direction[:, :-1] @ direction[:, 1:].transpose(2, 3)).clamp(0, 1)
        patches = videos.tokens.patches
        coordinates = [
            (coordinate.float() / (size - 1).clamp(min=1)).clamp(min=0)
            for coordinate, size in ((patches.row, patches.height), (patches.column, patches.width))
        ]
        position, _ = videos.group_by_frame(torch.stack(coordinates, dim=-1))
        position = position.flatten(1, 2).gather(1, picks.flat_index.flatten(1).unsqueeze(-1).expand(-1, -1, 2))
        position = position.view(*picks.flat_index.shape, 2)
        distance = torch.cdist(position[:, :-1], position[:, 1:], compute_mode="donot_use_mm_for_euclid_dist") / 2**0.5
        return alpha * dissimilarity + (1 - alpha) * distance


class _Picks(NamedTuple):
    """Picks of each frame, at most K.

    Attributes:
        mask: Picked tokens, shape (V, F, P), bool.
        flat_index: Flat index of each pick, shape (V, F, K), int64.
        valid: False for padding, shape (V, F, K), bool.
        x: Tokens, shape (V, F, K, D), float32.
        mass: Logarithm of each pick's share of its frame, shape (V, F, K).
    """

    mask: torch.Tensor
    flat_index: torch.Tensor
    valid: torch.Tensor
    x: torch.Tensor
    mass: torch.Tensor


def count_picks(keep: int, frames: list[int]) -> int:
    """Return the number of picks per frame for a video that keeps `keep` tokens. `frames` are the tokens per frame."""
    count, tokens = len(frames), sum(frames)
    if count == 1:
        return keep
    if keep <= count:
        return 1
    num_picks = int(max(frames) * (keep / tokens) ** (1 - _BETWEEN_FRAMES) + 1e-9)
    # Enough picks for the budget, and few enough that later frames need not lose all of them.
    return min(max(num_picks, -(-keep // count)), keep - count + 1)


def _compute_loss(x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Return the loss of coverage without each pick, relative to the largest loss of the frame, shape (R, K), float32.

    Args:
        x: Tokens of R frames, shape (R, P, D).
        weight: Weight of each token, shape (R, P).
        chosen: Picks, shape (R, K, D).
        valid: False for padding, shape (R, K), bool.
    """
    similarity = (normalize(x) @ normalize(chosen).transpose(1, 2)).masked_fill(~valid.unsqueeze(1), -2)
    first, best_index = similarity.max(2)
    second = similarity.scatter(2, best_index.unsqueeze(2), -2).amax(2)
    loss = weight * (first.clamp(min=0) - second.clamp(min=0))
    index = torch.arange(chosen.shape[1], device=x.device)
    loss_per_pick = (loss.unsqueeze(2) * (best_index.unsqueeze(2) == index)).sum(1)
    return loss_per_pick / loss_per_pick.amax(1, keepdim=True).clamp(min=1e-30)
