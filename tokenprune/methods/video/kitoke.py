# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from tokenprune.kernels.clusters import in_parts
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_MEASURED = 1024  # tokens that tell how far apart those of a video are


@register("kitoke", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2604.03414", merges=True)
@dataclass(frozen=True)
class KiToke(VideoMerger):
    """Draw tokens of a video the more likely the fewer others are like them, and merge the rest into the drawn ones
    (KiToke).

    How crowded a token is, is a sum of Gaussians of its distances to all tokens of the video; its chance is in
    proportion to the inverse, so that copies share one chance however many there are. As many as the budget says are
    drawn, never two where one would do: pairs of tokens play for their chances until all are drawn or out. Every other
    token joins the most similar drawn one of its interval, the frames between two sudden changes; means are weighted
    by the inverse, too. The interval without any takes those of the nearest one.

    sample: False takes the least crowded tokens in place of drawing.
    seed: int, of the draw; see `random`.
    alpha: width of the Gaussians, as a share of the median squared distance in the video.
    change: an interval ends where two frames are farther apart than this, in square roots of that median: the mean
    distance at the same place plus that to the nearest token.
    jump: or where they are farther apart than two neighbouring frames by this and by 40 %.

    Source: "KiToke", arXiv 2604.03414; no code is public: the formulas are those of notes and of a port by others.

    Differs from the paper, as far as that is known: distances are in units of the video's own median squared distance
    (of 1024 of its tokens, evenly spread), for which alpha, change and jump are our guess, where the paper has numbers
    for the features of LLaVA-OneVision; experimental. Compares all tokens of a video with each other.
    """

    asks_device: ClassVar[bool] = True

    sample: bool = True
    seed: int = 0
    alpha: Annotated[float, Gt(0)] = 0.16
    change: Annotated[float, Gt(0)] = 1.5
    jump: Annotated[float, Gt(0)] = 1.0

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        into = torch.full_like(videos.mask, -1, dtype=torch.long)
        weight = torch.ones_like(into, dtype=torch.float32)
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            frame = torch.tensor([f for f, size in enumerate(sizes) for _ in range(size)], device="cpu")
            spot = torch.tensor(
                [f * into.shape[2] + p for f, size in enumerate(sizes) for p in range(size)], device="cpu"
            )
            spot, frame = to_device(spot, into.device), to_device(frame, into.device)
            tokens = videos.x[video].flatten(0, 1)[spot]
            x = tokens - tokens.mean(0)  # so that distances between near ones are exact
            unit = median_squared_distance(x)
            rarity = 1 / compute_density(x, self.alpha * unit)
            kept = self._drawn(videos, video, compute_probabilities(rarity, keep), rarity, keep)
            interval = self._intervals(videos.x[video, : len(sizes)], videos.mask[video, : len(sizes)], unit.sqrt())
            own = find_nearest_nonempty(
                interval, torch.zeros_like(interval).index_add(0, interval[frame], kept.long())
            )[frame]

            place = partition(kept[None])[:, :keep]
            chosen, of = gather_tokens(tokens[None], place, 1), interval[frame][place]
            _, found = best_match(tokens[None], chosen, group_a=own[None], group_b=of)
            target = torch.where(kept, torch.arange(len(x), device=x.device), place[0][found[0]])
            into[video].view(-1)[spot] = spot[target]
            weight[video].view(-1)[spot] = rarity.float()
        return into, weight

    def _drawn(self, videos: Videos, video: int, chance: torch.Tensor, rarity: torch.Tensor, keep: int) -> torch.Tensor:
        """bool `[n]`: which tokens of a video are drawn. chance, rarity: float64 `[n]`."""
        if not self.sample:
            mask = torch.ones_like(rarity, dtype=torch.bool)[None]
            return top_mask(rarity.float()[None], mask, torch.full_like(mask[:, 0], keep, dtype=torch.long), keep)[0]
        generator = videos.tokens.generator(videos.segments[video], self.seed)
        drawn = torch.zeros(len(chance), dtype=torch.bool, device="cpu")
        drawn[sample_pivotal(chance.tolist(), keep, generator)] = True
        return to_device(drawn, rarity.device)

    def _intervals(self, x: torch.Tensor, mask: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """long `[F]`: the interval of each frame. x: `[F, P, D]`; mask: bool `[F, P]`; unit: of distances, float."""
        steps = [torch.zeros_like(unit)]
        for before, after, there, here in zip(x[:-1], x[1:], mask[:-1], mask[1:], strict=True):
            both = there & here
            same = (after - before).norm(dim=1).masked_fill(~both, 0).sum() / both.sum().clamp(min=1)
            apart = torch.cdist(before, after, compute_mode="donot_use_mm_for_euclid_dist")
            near = apart.masked_fill(~here, torch.inf).amin(1).masked_fill(~there, 0).sum() / there.sum().clamp(min=1)
            steps.append((same + near) / unit)
        step = torch.stack(steps)
        number = torch.arange(len(step), device=step.device)
        cut = step > self.change
        # The first frame has no step; the second has none before it, the last none after it.
        for shift, known in ((-1, number < len(step) - 1), (1, number > 1)):
            other = step.roll(shift)
            cut = cut | (known & (step - other > self.jump) & (step > 1.4 * other))
        return (cut & (number > 0)).long().cumsum(0)


def median_squared_distance(x: torch.Tensor) -> torch.Tensor:
    """float32 `[]`: the median squared distance of two tokens `[n, D]`, of at most 1024 of them."""
    step = -(-len(x) // _MEASURED)
    apart = torch.pdist(x[::step])
    floor = 1e-4 * x.square().sum(1).mean() + torch.finfo(x.dtype).tiny
    return torch.maximum(apart.median().square(), floor) if len(apart) else floor


def compute_density(x: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """float64 `[n]`: the sum over all tokens of exp(-squared distance / width), itself included. x: `[n, D]`."""
    norm, parts = x.square().sum(1), []
    for rows in in_parts(len(x), len(x)):
        squared = (norm[rows, None] + norm - 2 * x[rows] @ x.T).clamp(min=0)
        # Each is at no distance from itself, whatever rounding says.
        squared.diagonal(rows.start).fill_(0)
        parts.append((-squared / width).exp().sum(1, dtype=torch.float64))
    return torch.cat(parts)


def compute_probabilities(weight: torch.Tensor, number: int) -> torch.Tensor:
    """float64 `[n]`: in proportion to `weight` (`[n]`, above 0), at most 1, of sum `number`."""
    order = weight.argsort(descending=True, stable=True)
    sorted_ = weight[order].double()
    behind = sorted_.flip(0).cumsum(0).flip(0)
    factor = (number - torch.arange(len(sorted_), device=weight.device)) / behind  # if all before an entry are certain
    certain = (factor * sorted_ >= 1).cumprod(0).sum()
    factor = factor.gather(0, certain.clamp(max=len(sorted_) - 1)[None])
    return (weight.double() * factor).clamp(max=1)


def sample_pivotal(chance: list[float], number: int, generator: torch.Generator) -> list[int]:
    """Return the indices of the `number` that are drawn, each with its chance; they sum to `number`.

    In random order two at a time play: their chances go to one of the two, or, where that is more than 1, one is drawn
    and the other keeps the rest.
    """
    order = torch.randperm(len(chance), generator=generator, device="cpu").tolist()
    luck = torch.rand(len(chance), generator=generator, dtype=torch.float64, device="cpu").tolist()
    drawn: list[int] = []
    current, mine = order[0], chance[order[0]]
    for other, draw in zip(order[1:], luck[1:], strict=True):
        theirs = chance[other]
        both = mine + theirs
        if both < 1:
            if draw * both < theirs:
                current = other
            mine = both
            continue
        # One of the two is drawn: each stays after the likelier, the farther its chance is from 1.
        if draw * (2 - both) < 1 - mine:
            drawn.append(other)
        else:
            drawn.append(current)
            current = other
        mine = both - 1
    return _exactly([*drawn, current], number, drawn)


def _exactly(candidates: Iterable[int], number: int, drawn: list[int]) -> list[int]:
    """Return `number` of the candidates, the last of whom rounding may have left undecided."""
    return list(candidates)[:number] if len(drawn) < number else drawn[:number]


def find_nearest_nonempty(interval: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """long `[F]`: for each frame its interval, or, if that has none, the nearest that has one; of two the earlier.
    interval: long `[F]`; number: long `[F]`, how many each interval has."""
    index = torch.arange(len(number), device=number.device)
    apart = 2 * (interval[:, None] - index).abs() + (index > interval[:, None])
    return apart.masked_fill(number == 0, 4 * len(number)).argmin(1)
