# SPDX-License-Identifier: Apache-2.0
"""Operations on the frames of videos: similarity over time, segment boundaries, and budgets per frame.

Frames have their own axes, `[S, F, P, ...]`: S videos, F frames of the longest video, P tokens of the largest frame.
`group_by_frame` converts visual tokens to this layout. Padding has no effect, so a video gives the same result alone
and in a batch. Similarities are cosines in float32; a zero or non-finite vector has cosine 0 with all others. These are
plain PyTorch operations that do not synchronize with the device.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.pairs import normalize

if TYPE_CHECKING:
    from torch import Tensor

_TINY = 1e-12
_STEPS = 2.0**20


def group_by_frame(
    x: Tensor, frame: Tensor, index: Tensor, frames: int, tokens_per_frame: int
) -> tuple[Tensor, Tensor]:
    """Arrange tokens by frame.

    Args:
        x: Tokens, `[S, N, ...]`.
        frame: Frame index of each token, long `[S, N]`; -1 omits the token.
        index: Index of each token within its frame, long `[S, N]`; -1 omits the token.
        frames: Size F of the frame axis.
        tokens_per_frame: Size P of the token axis.

    Returns:
        Tokens by frame, `[S, F, P, ...]`, zeros at padding; and the mask of tokens, bool `[S, F, P]`.
    """
    rows, num_slots = len(x), frames * tokens_per_frame
    # Omitted tokens go to an extra entry at the end.
    slot = torch.where((frame >= 0) & (index >= 0), frame * tokens_per_frame + index, num_slots)
    flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
    dense = flat.new_zeros(rows, num_slots + 1, flat.shape[2]).scatter(1, slot.unsqueeze(-1).expand_as(flat), flat)
    occupied = torch.zeros(rows, num_slots + 1, dtype=torch.bool, device=x.device).scatter(1, slot, True)
    return dense[:, :-1].reshape(rows, frames, tokens_per_frame, *x.shape[2:]), occupied[:, :-1].view(
        rows, frames, tokens_per_frame
    )


def cosine_similarity(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of the vectors `[..., D]` of a and b, float32 `[...]`, rounded to multiples of 2**-20.

    Rounding gives equal vectors a cosine of exactly 1.
    """
    return (normalize(a) * normalize(b)).sum(-1).mul(_STEPS).round().div(_STEPS)


def previous_frame_similarity(x: Tensor, mask: Tensor) -> Tensor:
    """Return the cosine of each token to the token at the same index in the previous frame, float32 `[S, F - 1, P]`.

    Args:
        x: Tokens, `[S, F, P, D]`.
        mask: Valid tokens, bool `[S, F, P]`. The cosine is 0 if either token is padding.
    """
    return cosine_similarity(x[:, 1:], x[:, :-1]).masked_fill(~(mask[:, 1:] & mask[:, :-1]), 0)


def frame_means(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean token of each frame, float32 `[S, F, D]`, zeros for frames of padding.

    Args:
        x: Tokens, `[S, F, P, D]`.
        mask: Valid tokens, bool `[S, F, P]`.
    """
    valid = mask.unsqueeze(-1)
    return x.float().masked_fill(~valid, 0).sum(2) / valid.sum(2).clamp(min=1)


def select_stable_channels(x: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
    """Return the half of the channels with the least variance, float32 `[S, F, P, D // 2]` (VidCom2).

    Ties go to the lower channel. A single channel is kept.

    Args:
        x: Tokens, `[S, F, P, D]`.
        mask: Valid tokens, bool `[S, F, P]`. Others become zeros.
        counted: Tokens that the variance is computed over, bool `[S, F, P]`.
    """
    valid, count = counted.unsqueeze(-1), counted.sum((1, 2)).clamp(min=1)[:, None, None, None]
    x = x.float()
    mean = x.masked_fill(~valid, 0).sum((1, 2), keepdim=True) / count
    variance = ((x - mean).masked_fill(~valid, 0).square().sum((1, 2), keepdim=True) / count).flatten(1)
    least = variance.argsort(dim=1, stable=True)[:, : max(1, x.shape[-1] // 2)].sort(1).values
    return x.gather(3, least[:, None, None].expand(*x.shape[:3], -1)).masked_fill(~mask.unsqueeze(-1), 0)


def gaussian_similarity(x: Tensor, centre: Tensor) -> Tensor:
    """Return the sum of Gaussian kernels of the distance between `x` and `centre`, float32 `[...]` (VidCom2).

    The variances are 1/8, 1/4, 1/2, 1 and 2. `x` and `centre` are `[..., D]` and broadcast.
    """
    squared = (x - centre).square().sum(-1)
    return reduce(torch.add, (torch.exp(-squared / (2 * variance)) for variance in (1 / 8, 1 / 4, 1 / 2, 1, 2)))


# -- segments of a video -----------------------------------------------------------------------------------------------


def find_segment_ends(
    similarity: Tensor, frames: Tensor, min_segments: int | Tensor = 1, threshold: float = -2.0
) -> Tensor:
    """Split videos at the least similar frames.

    A segment ends where the similarity is below `threshold`, and at the lowest similarities until there are
    `min_segments` segments. Ties go to the earlier frame, and NaN is lowest.

    Args:
        similarity: Similarity of each frame to the next, float `[S, F - 1]`.
        frames: Number of frames of each video, long `[S]`.
        min_segments: Minimum number of segments, int or long `[S]`.
        threshold: Similarity below which a segment ends.

    Returns:
        True where a segment ends after the frame, bool `[S, F - 1]`.

    Examples:
        >>> find_segment_ends(torch.tensor([[0.9, 0.2, 0.8]]), torch.tensor([4]), min_segments=2).tolist()
        [[False, True, False]]
    """
    valid = _find_valid_steps(similarity, frames)
    value = similarity.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf, posinf=torch.inf)
    order = value.masked_fill(~valid, torch.inf).argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    min_segments = min_segments if isinstance(min_segments, int) else min_segments[:, None]
    return valid & ((value < threshold) | (rank < min_segments - 1))


def find_static_segment_ends(
    similarity: Tensor, mask: Tensor, frames: Tensor, threshold: float, max_frames: int = 1024
) -> Tensor:
    """Split videos into the segments that save the most static tokens (HoliTom), with dynamic programming.

    An index within a segment of n frames is static if its similarity exceeds `threshold` in all n - 1 steps. It then
    saves n - 1 tokens. Among equal partitions, the last segment is the shortest.

    Args:
        similarity: Result of `previous_frame_similarity`, float `[S, F - 1, P]`.
        mask: Valid entries of `similarity`, bool `[S, F - 1, P]`.
        frames: Number of frames of each video, long `[S]`.
        threshold: Similarity above which a token is static.
        max_frames: Maximum number of frames per segment.

    Returns:
        True where a segment ends after the frame, bool `[S, F - 1]`.
    """
    rows, steps = similarity.shape[:2]
    device, still = (
        similarity.device,
        (similarity > threshold) & mask & _find_valid_steps(similarity, frames).unsqueeze(-1),
    )
    # Tokens saved by the best partition of frames 0..e, start of its last segment, and static steps up to frame e.
    saved = torch.zeros(rows, steps + 1, dtype=torch.long, device=device)
    starts = torch.zeros(rows, steps + 1, dtype=torch.long, device=device)
    run = torch.zeros(rows, similarity.shape[2], dtype=torch.long, device=device)
    for end in range(steps + 1):
        if end:
            run = torch.where(still[:, end - 1], run + 1, 0)
        span = torch.arange(min(end + 1, max_frames), device=device)  # frames of the last segment, minus one
        gain = (run.unsqueeze(-1) >= span.clamp(min=1)).sum(1) * span
        before = torch.cat([saved[:, :end].flip(1), saved.new_zeros(rows, 1)], dim=1)[:, : len(span)]
        best = gain + before
        # argmax of int64 does not guarantee the first of equal values.
        first = (best == best.amax(1, keepdim=True)).to(torch.uint8).argmax(1, keepdim=True)
        saved[:, end : end + 1] = best.gather(1, first)
        starts[:, end : end + 1] = end - first
    ends = torch.zeros(rows, steps + 1, dtype=torch.bool, device=device)
    index = (frames[:, None] - 1).clamp(0, steps)
    for _ in range(steps):
        # The frame before the last segment ends the previous one. Before the first segment, frame 0 is rewritten
        # unchanged.
        index = starts.gather(1, index) - 1
        ends.scatter_(1, index.clamp(min=0), ends.gather(1, index.clamp(min=0)) | (index >= 0))
        index = index.clamp(min=0)
    return ends[:, :-1] & _find_valid_steps(similarity, frames)


def curvature(means: Tensor, frames: Tensor, eps: float = 1e-6) -> Tensor:
    """Return 1 - cosine of the steps before and after each frame, float32 `[S, F]` (V-CAST).

    The first and the last frame have 1, and padding has 0. A step shorter than `eps` counts as zero.

    Args:
        means: Frame means, `[S, F, D]`. See `frame_means`.
        frames: Number of frames of each video, long `[S]`.
        eps: Minimum length of a step.
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


def split_budget(
    weight: Tensor, total: Tensor, max_tokens: Tensor, min_tokens: int = 0, remainder: str = "fraction"
) -> Tensor:
    """Split the budget of each video among its frames in proportion to weights.

    The surplus of frames above their maximum goes to the other frames in proportion. Fractions are rounded by the
    largest remainder, or by the largest weight. Ties go to the earlier frame. The sum is exact unless the maxima add up
    to less. If the frames with positive weights are full, the other frames have equal weights.

    Args:
        weight: Nonnegative weights, float `[S, F]`. NaN counts as 0.
        total: Budgets, long `[S]`.
        max_tokens: Maximum of each frame, long `[S, F]`, 0 at padding.
        min_tokens: Tokens that each frame gets first, if `total` suffices for all frames.
        remainder: "fraction" or "largest": rounding by the largest fraction or weight.

    Returns:
        Tokens of each frame, long `[S, F]`.

    Examples:
        >>> split_budget(torch.tensor([[3.0, 1.0]]), torch.tensor([8]), torch.tensor([[5, 5]])).tolist()
        [[5, 3]]
    """
    first = torch.minimum(max_tokens, torch.full_like(max_tokens, min_tokens))
    first = first * (first.sum(1, keepdim=True) <= total[:, None])
    room = max_tokens - first
    remaining = torch.minimum(total - first.sum(1), room.sum(1)).clamp(min=0)[:, None]
    weight = _normalize_weights(weight) * (room > 0)
    # Frames with the least room relative to their weight fill up first.
    ratio = torch.where(weight > 0, room / weight.clamp(min=_TINY), torch.inf)
    order = ratio.argsort(dim=1, stable=True)
    taken = room.gather(1, order).cumsum(1) - room.gather(1, order)  # room of earlier frames in this order
    behind = weight.gather(1, order).flip(1).cumsum(1).flip(1)
    level = (remaining - taken) / behind.clamp(min=torch.finfo(torch.float64).tiny)
    filled = (level > ratio.gather(1, order)).cumprod(1).sum(1, keepdim=True)  # number of full frames
    level = level.gather(1, filled.clamp(max=room.shape[1] - 1))
    exact = torch.minimum((level * weight).nan_to_num(nan=0.0), room.double())
    exact = torch.where(order.argsort(dim=1) < filled, room.double(), exact)
    floored = _floor(exact)
    claim = weight if remainder == "largest" else exact - floored
    return first + _add_remainder(floored, claim, remaining, floored < room)


def split_budget_in_rounds(weight: Tensor, total: Tensor, max_tokens: Tensor) -> Tensor:
    """Split the budget of each video in rounds, and share the surplus of full frames again (OTT-Vid).

    Each round splits the rest among the frames below their limit, rounded by largest fractions (ties go to the earlier
    frame), and only then applies the limits. The surplus is the rest of the next round. `split_budget` applies the
    limits before it rounds, so the two can differ by a few tokens. The sum is exact unless the limits add up to less.

    Args:
        weight: Float weights, shape (S, F). NaN and negative weights count as 0.
        total: Long totals, shape (S).
        max_tokens: Long limit of each frame, shape (S, F); 0 for padding.

    Returns:
        Long count of each frame, shape (S, F).
    """
    weight = _normalize_weights(weight)
    counts = torch.zeros_like(max_tokens)
    rest = torch.minimum(total, max_tokens.sum(1)).clamp(min=0)[:, None]
    # Each round but the last fills at least one frame.
    for _ in range(max_tokens.shape[1]):
        is_open = counts < max_tokens
        open_weight = weight * is_open
        exact = rest * open_weight / open_weight.sum(1, keepdim=True).clamp(min=_TINY)
        floored = _floor(exact)
        unlimited = counts + _add_remainder(floored, exact - floored, rest, is_open)
        counts = torch.minimum(unlimited, max_tokens)
        rest = (unlimited - counts).sum(1, keepdim=True)
    return counts


def _normalize_weights(weight: Tensor) -> Tensor:
    """Return float64 weights divided by the largest weight of their row, at least `_TINY`."""
    weight = weight.double().nan_to_num(nan=0.0).clamp(min=0)
    weight = weight / weight.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return weight.clamp(min=_TINY)


def _floor(exact: Tensor) -> Tensor:
    """Round float64 values down to long. A value within 1e-9 of an integer rounds to this integer."""
    return torch.where((exact - exact.round()).abs() < 1e-9, exact.round(), exact.floor()).long()


def _add_remainder(floored: Tensor, claim: Tensor, total: Tensor, is_open: Tensor) -> Tensor:
    """Add 1 to the open entries with the largest claims until each row of `floored` sums to `total`.

    Claims that differ by less than about 1e-9 are ties, which go to the earlier entry.
    """
    claim = torch.where(is_open, (claim * 1e9).round(), -torch.inf)
    rank = claim.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return floored + ((rank < total - floored.sum(1, keepdim=True)) & is_open).long()


def _find_valid_steps(similarity: Tensor, frames: Tensor) -> Tensor:
    """Return True for steps between two frames of a video, bool `[S, F - 1]`."""
    return torch.arange(similarity.shape[1], device=similarity.device) < frames[:, None] - 1
