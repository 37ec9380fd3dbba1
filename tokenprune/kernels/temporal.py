# SPDX-License-Identifier: Apache-2.0
"""Operations on the frames of videos: similarity over time, the ends of scenes, and each frame's share of a budget.

Frames lie on axes of their own, `[S, F, P, ...]`: S videos, F frames of the longest, P tokens of the largest frame;
`by_frame` brings visual tokens there. Shorter videos and smaller frames are padded, and padding influences nothing, so
that a batch gives what its videos give alone. Similarities are cosines in float32; a vector of zeros, or with NaN in
it, is similar to nothing. Plain PyTorch; nothing here asks the device.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.pairs import distances, is_finite, normalize
from tokenprune.kernels.take import top_mask

if TYPE_CHECKING:
    from torch import Tensor

_TINY = 1e-12
_STEPS = 2.0**20


def group_by_frame(x: Tensor, frame: Tensor, place: Tensor, frames: int, places: int) -> tuple[Tensor, Tensor]:
    """Return `x` `[S, N, ...]` as `[S, F, P, ...]`, zeros where there is no token, and where there is one, bool `[S, F,
    P]`.

    frame, place: long `[S, N]`, index of each token's frame and its place there; -1 leaves it out. frames, places: F
    and P, at least as large as these indices ask for.
    """
    rows, spots = len(x), frames * places
    # What is in no frame goes to a scratch entry at the end.
    spot = torch.where((frame >= 0) & (place >= 0), frame * places + place, spots)
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
    dense = flat.new_zeros(rows, spots + 1, flat.shape[2]).scatter(1, spot.unsqueeze(-1).expand_as(flat), flat)
    there = torch.zeros(rows, spots + 1, dtype=torch.bool, device=x.device).scatter(1, spot, True)
    return dense[:, :-1].reshape(rows, frames, places, *x.shape[2:]), there[:, :-1].view(rows, frames, places)


def cosine_similarity(a: Tensor, b: Tensor) -> Tensor:
    """float32 `[...]`: cosine of the vectors `[..., D]` of a and b, to a multiple of 2**-20: what does not change has
    exactly 1 everywhere, and not here a little more than there."""
    return (normalize(a) * normalize(b)).sum(-1).mul(_STEPS).round().div(_STEPS)


def previous_frame_similarity(x: Tensor, mask: Tensor) -> Tensor:
    """float32 `[S, F - 1, P]`: cosine of each token `[S, F, P, D]` to the one at the same place of the frame before; 0
    where either is padding (mask: bool `[S, F, P]`, False there)."""
    return cosine_similarity(x[:, 1:], x[:, :-1]).masked_fill(~(mask[:, 1:] & mask[:, :-1]), 0)


def frame_means(x: Tensor, mask: Tensor) -> Tensor:
    """float32 `[S, F, D]`: mean of the tokens `[S, F, P, D]` of each frame, zeros for a frame of padding."""
    real = mask.unsqueeze(-1)
    return x.float().masked_fill(~real, 0).sum(2) / real.sum(2).clamp(min=1)


def select_stable_channels(x: Tensor, mask: Tensor, seen: Tensor) -> Tensor:
    """float32 `[S, F, P, D // 2]`: the tokens `[S, F, P, D]` on the half of the channels that varies least over those
    in `seen`; zeros for padding (VidCom2).

    mask, seen: bool `[S, F, P]`. Of channels that vary alike the lower ones are taken; of a single one that one.
    """
    real, number = seen.unsqueeze(-1), seen.sum((1, 2)).clamp(min=1)[:, None, None, None]
    x = x.float()
    mean = x.masked_fill(~real, 0).sum((1, 2), keepdim=True) / number
    variance = ((x - mean).masked_fill(~real, 0).square().sum((1, 2), keepdim=True) / number).flatten(1)
    least = variance.argsort(dim=1, stable=True)[:, : max(1, x.shape[-1] // 2)].sort(1).values
    return x.gather(3, least[:, None, None].expand(*x.shape[:3], -1)).masked_fill(~mask.unsqueeze(-1), 0)


def gaussian_similarity(x: Tensor, centre: Tensor) -> Tensor:
    """float32 `[...]`: how near the vectors `[..., D]` of `x` are to those of `centre`, broadcast: the sum of Gaussians
    of the distance, of variances from 1/8 to 2 (VidCom2)."""
    squared = (x - centre).square().sum(-1)
    return reduce(torch.add, (torch.exp(-squared / (2 * variance)) for variance in (1 / 8, 1 / 4, 1 / 2, 1, 2)))


# -- where a video falls into segments ---------------------------------------------------------------------------------


def find_segment_ends(similarity: Tensor, frames: Tensor, least: int | Tensor = 1, threshold: float = -2.0) -> Tensor:
    """bool `[S, F - 1]`: whether a segment ends after each frame, by how similar that is to the next.

    similarity: float `[S, F - 1]`. frames: long `[S]`, of each video. It ends where the similarity is below
    `threshold`, and at the lowest ones of all, as many as make `least` segments of the video (an int, or long `[S]`; of
    equal ones the earlier; NaN counts as lowest).
    """
    real = _steps(similarity, frames)
    value = similarity.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
    order = value.masked_fill(~real, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    least = least if isinstance(least, int) else least[:, None]
    return real & ((value < threshold) | (rank < least - 1))


def find_static_segment_ends(
    similarity: Tensor, mask: Tensor, frames: Tensor, threshold: float, most: int = 1024
) -> Tensor:
    """bool `[S, F - 1]`: whether a segment ends after each frame, in the partition that saves most (HoliTom).

    similarity: float `[S, F - 1, P]`, see `same_place`; mask: bool `[S, F - 1, P]`, which of it counts. frames: long
    `[S]`. A place of a segment of n frames is still if it is above `threshold` in all n - 1 steps, and saves n - 1
    tokens. A dynamic programme finds the partition that saves most; of equal ones the last segment is the shortest.
    most: frames of a segment.
    """
    rows, steps = similarity.shape[:2]
    device, still = similarity.device, (similarity > threshold) & mask & _steps(similarity, frames).unsqueeze(-1)
    saved = torch.zeros(rows, steps + 1, dtype=torch.long, device=device)  # by the best partition of frames 0 to e
    starts = torch.zeros(rows, steps + 1, dtype=torch.long, device=device)  # of the last segment of that partition
    run = torch.zeros(rows, similarity.shape[2], dtype=torch.long, device=device)  # still steps of each place up to e
    for end in range(steps + 1):
        if end:
            run = torch.where(still[:, end - 1], run + 1, 0)
        span = torch.arange(min(end + 1, most), device=device)  # frames of the last segment, less one
        gain = (run.unsqueeze(-1) >= span.clamp(min=1)).sum(1) * span
        before = torch.cat([saved[:, :end].flip(1), saved.new_zeros(rows, 1)], dim=1)[:, : len(span)]
        best = gain + before
        # argmax names any of equal values; the first of them is asked for.
        first = (best == best.amax(1, keepdim=True)).to(torch.uint8).argmax(1, keepdim=True)
        saved[:, end : end + 1] = best.gather(1, first)
        starts[:, end : end + 1] = end - first
    ends = torch.zeros(rows, steps + 1, dtype=torch.bool, device=device)
    place = (frames[:, None] - 1).clamp(0, steps)
    for _ in range(steps):
        # The frame before the last segment ends one; before the first segment there is none (written to frame 0 as it
        # is).
        place = starts.gather(1, place) - 1
        ends.scatter_(1, place.clamp(min=0), ends.gather(1, place.clamp(min=0)) | (place >= 0))
        place = place.clamp(min=0)
    return ends[:, :-1] & _steps(similarity, frames)


def curvature(means: Tensor, frames: Tensor, eps: float = 1e-6) -> Tensor:
    """float32 `[S, F]`: how sharply the path of frames turns at each (V-CAST): 1 - cosine of the step to it and the
    step from it; 1 at both ends, 0 for padding.

    means: `[S, F, D]`, see `frame_means`; frames: long `[S]`. A step shorter than `eps` points nowhere.
    """
    path = normalize(means)
    step = path.diff(dim=1)
    step = step / step.norm(dim=-1, keepdim=True).clamp(min=eps)
    turn = torch.ones(means.shape[:2], dtype=torch.float32, device=means.device)
    turn[:, 1:-1] = 1 - (step[:, :-1] * step[:, 1:]).sum(-1)
    index = torch.arange(means.shape[1], device=means.device)
    turn = torch.where(index == frames[:, None] - 1, 1.0, turn)
    return turn.masked_fill(index >= frames[:, None], 0)


# -- budgets -----------------------------------------------------------------------------------------------------------


def split_budget(weight: Tensor, total: Tensor, most: Tensor, least: int = 0, remainder: str = "fraction") -> Tensor:
    """long `[S, F]`: split `total` (long `[S]`) among F frames in proportion to `weight` (float `[S, F]`, at least 0).

    most: long `[S, F]`, what each can take at most, 0 for padding: what is above that goes to the others in
    proportion. What does not divide goes to the largest fractions, or with remainder="largest" to the largest weights,
    of equal ones the earlier. The sum is exact, as far as there is room. least: what each gets beforehand, where
    `total` suffices for all. NaN weighs nothing; where all that weigh anything are full, the others are alike.
    """
    first = torch.minimum(most, torch.full_like(most, least))
    first = first * (first.sum(1, keepdim=True) <= total[:, None])
    room = most - first
    left = torch.minimum(total - first.sum(1), room.sum(1)).clamp(min=0)[:, None]
    weight = _relative(weight) * (room > 0)
    # Frames that are full first: those whose room is smallest beside their weight.
    ratio = torch.where(weight > 0, room / weight.clamp(min=_TINY), torch.inf)
    order = ratio.argsort(dim=1, stable=True)
    taken = room.gather(1, order).cumsum(1) - room.gather(1, order)  # by those before, if they are full
    behind = weight.gather(1, order).flip(1).cumsum(1).flip(1)
    level = (left - taken) / behind.clamp(min=torch.finfo(torch.float64).tiny)
    filled = (level > ratio.gather(1, order)).cumprod(1).sum(1, keepdim=True)  # frames at the front that are full
    level = level.gather(1, filled.clamp(max=room.shape[1] - 1))
    exact = torch.minimum((level * weight).nan_to_num(nan=0.0), room.double())
    exact = torch.where(order.argsort(dim=1) < filled, room.double(), exact)
    whole = _floor(exact)
    claim = weight if remainder == "largest" else exact - whole
    return first + _add_remainder(whole, claim, left, whole < room)


def split_budget_in_rounds(weight: Tensor, total: Tensor, most: Tensor) -> Tensor:
    """Split a total among frames in proportion to their weights, and share the surplus of full frames again (OTT-Vid).

    Each round splits the rest among the frames below their limit, rounded by largest fractions (ties go to the earlier
    frame), and only then applies the limits; the surplus is the rest of the next round. `shares` applies the limits
    before it rounds, so the two can differ by a few tokens. The sum is exact unless the limits add up to less.

    Args:
        weight: Float weights, shape (S, F). NaN and negative weights count as 0.
        total: Long totals, shape (S).
        most: Long limit of each frame, shape (S, F); 0 for padding.

    Returns:
        Long count of each frame, shape (S, F).
    """
    weight = _relative(weight)
    counts = torch.zeros_like(most)
    rest = torch.minimum(total, most.sum(1)).clamp(min=0)[:, None]
    # Each round but the last fills at least one frame.
    for _ in range(most.shape[1]):
        is_open = counts < most
        open_weight = weight * is_open
        exact = rest * open_weight / open_weight.sum(1, keepdim=True).clamp(min=_TINY)
        whole = _floor(exact)
        unlimited = counts + _add_remainder(whole, exact - whole, rest, is_open)
        counts = torch.minimum(unlimited, most)
        rest = (unlimited - counts).sum(1, keepdim=True)
    return counts


def _relative(weight: Tensor) -> Tensor:
    """Return float64 weights divided by the largest of their row, at least `_TINY`."""
    weight = weight.double().nan_to_num(nan=0.0).clamp(min=0)
    weight = weight / weight.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return weight.clamp(min=_TINY)


def _floor(exact: Tensor) -> Tensor:
    """Round float64 values down to long; a value within 1e-9 of an integer is that integer."""
    return torch.where((exact - exact.round()).abs() < 1e-9, exact.round(), exact.floor()).long()


def _add_remainder(whole: Tensor, claim: Tensor, total: Tensor, is_open: Tensor) -> Tensor:
    """Add 1 to the open entries with the largest claims until each row of `whole` adds up to `total`.

    Claims that differ by less than about 1e-9 are equal; of equal claims the earlier entry is first.
    """
    claim = torch.where(is_open, (claim * 1e9).round(), -torch.inf)
    rank = claim.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return whole + ((rank < total - whole.sum(1, keepdim=True)) & is_open).long()


def density_peaks(x: Tensor, mask: Tensor, number: Tensor, neighbours: int, most: int, capped: bool = False) -> Tensor:
    """bool `[S, N]`: the `number` (long `[S]`, at most `most`) tokens that are best as centres of clusters (DPC-KNN).

    x: `[S, N, D]`; mask: bool `[S, N]`. Distances are Euclidean, divided by sqrt(D). A token's density is exp(-mean of
    its `neighbours` smallest squared distances, its own of 0 among them); its peak the distance to the nearest denser
    token, or the largest to any where none is denser. The largest products are the centres; of equal densities the
    lower index is denser, of equal products it is taken. A token with NaN comes last. Takes memory for N x N distances.
    capped: a density counts no more neighbours than there are centres.
    """
    count = x.shape[1]
    usable = mask & is_finite(x)
    barred = ~usable
    points = x.float().masked_fill(barred.unsqueeze(-1), 0)
    distance = distances(points, points) / x.shape[-1] ** 0.5
    apart = barred.unsqueeze(1) | barred.unsqueeze(2)
    distance = distance.masked_fill(apart, torch.inf)
    near = distance.topk(min(neighbours, count), dim=2, largest=False).values.square()
    known = near < torch.inf
    if capped:
        known &= torch.arange(near.shape[2], device=x.device) < number.clamp(min=1)[:, None, None]
    # The logarithm: densities of tokens that are far from all others would all round to 0.
    density = -(near.masked_fill(~known, 0).sum(2) / known.sum(2).clamp(min=1)).masked_fill(barred, torch.inf)
    order = density.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    # Where a distance is infinite already, or the other token is no denser.
    peak = distance.masked_fill(order.unsqueeze(1) >= order.unsqueeze(2), torch.inf).amin(2)
    farthest = distance.masked_fill(apart, -torch.inf).amax(2)
    peak = torch.where(peak < torch.inf, peak, farthest)
    score = (density + peak.log()).clamp(min=torch.finfo(torch.float32).min)
    return top_mask(score.masked_fill(barred, -torch.inf), mask, number, most)


def _steps(similarity: Tensor, frames: Tensor) -> Tensor:
    """bool `[S, F - 1]`: which steps from frame to frame there are."""
    return torch.arange(similarity.shape[1], device=similarity.device) < frames[:, None] - 1
