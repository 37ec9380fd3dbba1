# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from tokenprune.kernels.clusters import split_rows
from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.match import best_match
from tokenprune.kernels.take import top_mask
from tokenprune.kernels.transfer import to_device
from tokenprune.methods.registry import register
from tokenprune.methods.video.merging import VideoMerger
from tokenprune.selection.method import Site
from tokenprune.selection.videos import Videos

_MAX_SAMPLE = 1024  # maximum number of tokens in the estimate of the median distance


@register("kitoke", site=Site.PRE_LLM, needs=("frames",), paper="arXiv 2604.03414", merges=True)
@dataclass(frozen=True)
class KiToke(VideoMerger):
    """Sample rare tokens of a video and merge the rest into them (KiToke).

    The density of a token is the sum of Gaussians of its distances to all tokens of the video. Its sampling probability
    is proportional to the inverse, so duplicates share one probability. Pivotal sampling draws exactly as many tokens
    as the budget allows and avoids drawing close duplicates. Every other token joins the most similar sampled token of
    its interval, the frames between two abrupt changes. Means are weighted by inverse density. An interval without
    samples uses those of the nearest interval.

    The method compares all tokens of a video with each other.

    Args:
        sample: Draw at random. False keeps the tokens with the lowest density.
        seed: Seed of the draw. See `random`.
        alpha: Squared bandwidth of the Gaussians, as a share of the median squared distance in the video.
        change: An interval ends if the distance of two frames exceeds this, in square roots of the median squared
            distance. The distance is the mean distance of equal patches plus the mean distance to the nearest token.
        jump: An interval also ends if the distance exceeds that of a neighbouring step by this value and by 40 %.

    Source:
        "KiToke" (arXiv 2604.03414). Reconstruction: no code is public, and the formulas come from notes and a port by
        others.

    Differences from the paper:
        - Distances are relative to the video's median squared distance, from 1024 evenly spaced tokens. The paper uses
          constants for the features of LLaVA-OneVision. The defaults of `alpha`, `change` and `jump` are guesses.

    Examples:
        >>> model, _ = tokenprune.demo_model("demo_qwen")
        >>> model = tokenprune.patch(model, KiToke(seed=1), keep=0.25)
    """

    syncs_device: ClassVar[bool] = True

    sample: bool = True
    seed: int = 0
    alpha: Annotated[float, Gt(0)] = 0.16
    change: Annotated[float, Gt(0)] = 1.5
    jump: Annotated[float, Gt(0)] = 1.0

    def merge(self, videos: Videos) -> tuple[torch.Tensor, torch.Tensor]:
        target = torch.full_like(videos.mask, -1, dtype=torch.long)
        weight = torch.ones_like(target, dtype=torch.float32)
        for video, (sizes, keep) in enumerate(zip(videos.frames, videos.keep, strict=True)):
            frame = torch.tensor([f for f, size in enumerate(sizes) for _ in range(size)], device="cpu")
            index = torch.tensor(
                [f * target.shape[2] + p for f, size in enumerate(sizes) for p in range(size)], device="cpu"
            )
            index, frame = to_device(index, target.device), to_device(frame, target.device)
            tokens = videos.hidden[video].flatten(0, 1)[index]
            x = tokens - tokens.mean(0)  # reduces cancellation in distances between close tokens
            unit = median_squared_distance(x)
            rarity = 1 / compute_density(x, self.alpha * unit)
            kept = self._sample(videos, video, compute_probabilities(rarity, keep), rarity, keep)
            frames, mask = videos.hidden[video, : len(sizes)], videos.mask[video, : len(sizes)]
            interval = self._find_intervals(frames, mask, unit.sqrt())
            num_samples = torch.zeros_like(interval).index_add(0, interval[frame], kept.long())
            token_interval = find_nearest_nonempty(interval, num_samples)[frame]

            sample_index = partition(kept[None])[:, :keep]
            chosen, sample_interval = gather_tokens(tokens[None], sample_index, 1), interval[frame][sample_index]
            _, nearest = best_match(tokens[None], chosen, group_a=token_interval[None], group_b=sample_interval)
            absorbing = torch.where(kept, torch.arange(len(x), device=x.device), sample_index[0][nearest[0]])
            target[video].view(-1)[index] = index[absorbing]
            weight[video].view(-1)[index] = rarity.float()
        return target, weight

    def _sample(
        self, videos: Videos, video: int, chance: torch.Tensor, rarity: torch.Tensor, keep: int
    ) -> torch.Tensor:
        """Return the sampled tokens of a video, shape (tokens,), bool.

        Args:
            videos: Tokens by frame.
            video: Index of the video.
            chance: Sampling probabilities, shape (tokens,), float64.
            rarity: Inverse densities, shape (tokens,), float64.
            keep: Number of sampled tokens.
        """
        if not self.sample:
            mask = torch.ones_like(rarity, dtype=torch.bool)[None]
            return top_mask(rarity.float()[None], mask, torch.full_like(mask[:, 0], keep, dtype=torch.long), keep)[0]
        generator = videos.tokens.generator(videos.segments[video], self.seed)
        drawn = torch.zeros(len(chance), dtype=torch.bool, device="cpu")
        drawn[sample_pivotal(chance.tolist(), keep, generator)] = True
        return to_device(drawn, rarity.device)

    def _find_intervals(self, x: torch.Tensor, mask: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Return the interval of each frame, shape (frames,), int64.

        Args:
            x: Tokens, shape (frames, patches, channels).
            mask: False for padding, shape (frames, patches).
            unit: Unit of distances, a scalar.
        """
        steps = [torch.zeros_like(unit)]
        for previous, current, previous_mask, current_mask in zip(x[:-1], x[1:], mask[:-1], mask[1:], strict=True):
            is_pair = previous_mask & current_mask
            patch_distance = (current - previous).norm(dim=1).masked_fill(~is_pair, 0).sum()
            patch_distance = patch_distance / is_pair.sum().clamp(min=1)
            distances = torch.cdist(previous, current, compute_mode="donot_use_mm_for_euclid_dist")
            nearest = distances.masked_fill(~current_mask, torch.inf).amin(1).masked_fill(~previous_mask, 0)
            nearest_distance = nearest.sum() / previous_mask.sum().clamp(min=1)
            steps.append((patch_distance + nearest_distance) / unit)
        step = torch.stack(steps)
        index = torch.arange(len(step), device=step.device)
        cut = step > self.change
        # The first frame has no step. The second has no earlier neighbour, the last no later neighbour.
        for shift, has_neighbour in ((-1, index < len(step) - 1), (1, index > 1)):
            other = step.roll(shift)
            cut = cut | (has_neighbour & (step - other > self.jump) & (step > 1.4 * other))
        return (cut & (index > 0)).long().cumsum(0)


def median_squared_distance(x: torch.Tensor) -> torch.Tensor:
    """Return the median squared distance of two tokens (tokens, channels), a scalar, from at most 1024 tokens."""
    step = -(-len(x) // _MAX_SAMPLE)
    distances = torch.pdist(x[::step])
    floor = 1e-4 * x.square().sum(1).mean() + torch.finfo(x.dtype).tiny
    return torch.maximum(distances.median().square(), floor) if len(distances) else floor


def compute_density(x: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Return the density of each token, shape (tokens,), float64: the sum over all tokens of exp(-d^2 / width)."""
    norm, parts = x.square().sum(1), []
    for rows in split_rows(len(x), len(x)):
        squared = (norm[rows, None] + norm - 2 * x[rows] @ x.T).clamp(min=0)
        # Rounding can make the distance of a token to itself positive.
        squared.diagonal(rows.start).fill_(0)
        parts.append((-squared / width).exp().sum(1, dtype=torch.float64))
    return torch.cat(parts)


def compute_probabilities(weight: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Return sampling probabilities proportional to `weight` (tokens,), at most 1 each, with sum `num_samples`."""
    order = weight.argsort(descending=True, stable=True)
    sorted_ = weight[order].double()
    rest_sum = sorted_.flip(0).cumsum(0).flip(0)
    # The common factor, if all larger weights have probability 1.
    factor = (num_samples - torch.arange(len(sorted_), device=weight.device)) / rest_sum
    certain = (factor * sorted_ >= 1).cumprod(0).sum()
    factor = factor.gather(0, certain.clamp(max=len(sorted_) - 1)[None])
    return (weight.double() * factor).clamp(max=1)


def sample_pivotal(chance: list[float], num_samples: int, generator: torch.Generator) -> list[int]:
    """Draw `num_samples` indices with the given probabilities by the pivotal method.

    Tokens compete in pairs, in random order. Two probabilities with a sum below 1 move to one of the tokens. Otherwise
    one token is drawn, and the other keeps the rest.

    Args:
        chance: Sampling probabilities with the sum `num_samples`.
        num_samples: Number of drawn indices.
        generator: Random number generator on the CPU.
    """
    order = torch.randperm(len(chance), generator=generator, device="cpu").tolist()
    draws = torch.rand(len(chance), generator=generator, dtype=torch.float64, device="cpu").tolist()
    drawn: list[int] = []
    current, current_chance = order[0], chance[order[0]]
    for other, draw in zip(order[1:], draws[1:], strict=True):
        other_chance = chance[other]
        total = current_chance + other_chance
        if total < 1:
            if draw * total < other_chance:
                current = other
            current_chance = total
            continue
        # One of the two is drawn. The other stays in the game with the rest of the probability.
        if draw * (2 - total) < 1 - current_chance:
            drawn.append(other)
        else:
            drawn.append(current)
            current = other
        current_chance = total - 1
    return _take_exactly([*drawn, current], num_samples, drawn)


def _take_exactly(candidates: Iterable[int], num_samples: int, drawn: list[int]) -> list[int]:
    """Return `num_samples` of the candidates. Rounding may leave the last one undecided."""
    return list(candidates)[:num_samples] if len(drawn) < num_samples else drawn[:num_samples]


def find_nearest_nonempty(interval: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
    """Return the nearest interval with samples for each frame, shape (frames,), int64; the earlier of two.

    Args:
        interval: Interval of each frame, shape (frames,).
        num_samples: Samples per interval, shape (frames,).
    """
    index = torch.arange(len(num_samples), device=num_samples.device)
    distance = 2 * (interval[:, None] - index).abs() + (index > interval[:, None])
    return distance.masked_fill(num_samples == 0, 4 * len(num_samples)).argmin(1)
