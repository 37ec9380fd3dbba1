# SPDX-License-Identifier: Apache-2.0
"""Functions of video frames equal naive loops, also in ragged batches."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from each import each
from tokenprune.kernels.density import density_peaks
from tokenprune.kernels.take import adjust_count
from tokenprune.kernels.temporal import (
    curvature,
    find_segment_ends,
    find_static_segment_ends,
    frame_means,
    group_by_frame,
    previous_frame_similarity,
    split_budget,
    split_budget_in_rounds,
)

VIDEOS = [(5, 4), (1, 6), (3, 1), (2, 5)]  # frames and tokens per frame of each video


def make_videos(seed: int = 0, width: int = 6) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Return videos `[F, P, D]`, their batch with nonzero padding, its mask and the frame counts."""
    g = torch.Generator().manual_seed(seed)
    videos = [torch.randn(frames, num_tokens, width, generator=g) for frames, num_tokens in VIDEOS]
    max_sizes = [max(sizes) for sizes in zip(*VIDEOS, strict=True)]
    padded = torch.full((len(videos), *max_sizes, width), 7.0)
    mask = torch.zeros(padded.shape[:3], dtype=torch.bool)
    for row, video in enumerate(videos):
        padded[row, : video.shape[0], : video.shape[1]] = video
        mask[row, : video.shape[0], : video.shape[1]] = True
    return videos, padded, mask, torch.tensor([frames for frames, _ in VIDEOS])


def naive_cosine(a: list[float], b: list[float]) -> float:
    length = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / length if length > 0 else 0.0


def test_group_by_frame() -> None:
    videos, padded, mask, _ = make_videos()
    rows = [[(f, p) for f in range(frames) for p in range(num_tokens)] for frames, num_tokens in VIDEOS]
    rows[2].append((-1, -1))  # a newline token after the last frame
    width = max(map(len, rows))
    x = torch.full((len(rows), width, 6), 9.0)
    frame, slot = torch.full((len(rows), width), -1), torch.full((len(rows), width), -1)
    for row, (indices, video) in enumerate(zip(rows, videos, strict=True)):
        for i, (f, p) in enumerate(indices):
            frame[row, i], slot[row, i] = f, p
            x[row, i] = video[f, p] if f >= 0 else 5.0
    dense, valid = group_by_frame(x, frame, slot, *padded.shape[1:3])
    assert torch.equal(valid, mask) and torch.equal(dense, padded.masked_fill(~mask[..., None], 0))
    scores, _ = group_by_frame(x[..., 0], frame, slot, *padded.shape[1:3])
    assert torch.equal(scores, dense[..., 0])


def test_similarity_to_the_frame_before() -> None:
    videos, padded, mask, _ = make_videos()
    padded[0, 2, 1] = 0  # a zero vector, with similarity 0
    padded[0, 3, 2, 0] = torch.nan
    videos[0] = padded[0, :5, :4]
    got = previous_frame_similarity(padded, mask)
    assert got.dtype == torch.float32 and previous_frame_similarity(padded.half(), mask).dtype == torch.float32
    want = torch.zeros_like(got)
    for row, video in enumerate(videos):
        for f, p in product(range(1, video.shape[0]), range(video.shape[1])):
            has_nan = video[f, p].isnan().any() or video[f - 1, p].isnan().any()
            want[row, f - 1, p] = 0 if has_nan else naive_cosine(video[f, p].tolist(), video[f - 1, p].tolist())
    torch.testing.assert_close(got, want)
    assert not got[0, 1:3, 1].any() and not got[0, 2:, 2].any()


def test_means_of_frames() -> None:
    videos, padded, mask, _ = make_videos()
    got = frame_means(padded, mask)
    for row, video in enumerate(videos):
        torch.testing.assert_close(got[row, : len(video)], video.mean(1))
        assert not got[row, len(video) :].any()


# -- segments ----------------------------------------------------------------------------------------------------------


def naive_segments(values: list[float], min_segments: int, threshold: float) -> list[bool]:
    worst = sorted(range(len(values)), key=lambda i: (-math.inf if values[i] != values[i] else values[i], i))
    return [i in worst[: min_segments - 1] or not values[i] >= threshold for i in range(len(values))]


@each("min_segments", [1, 2, 4, 9])
@each("threshold", [-2.0, 0.3, 0.5, 2.0])
def test_segment_ends_by_threshold_and_count(min_segments: int, threshold: float) -> None:
    rows = [[0.9, 0.1, 0.5, 0.1, 0.4], [0.2], [], [0.5, 0.5, 0.5], [0.6, math.nan, -1.0]]
    padded = torch.full((len(rows), 6), -5.0)  # padding is less similar than anything
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    got = find_segment_ends(padded, torch.tensor([len(row) + 1 for row in rows]), min_segments, threshold)
    for i, row in enumerate(rows):
        assert got[i].tolist() == naive_segments(row, min_segments, threshold) + [False] * (6 - len(row))


def list_partitions(frames: int) -> list[list[int]]:
    """Return the segment lengths of each partition of a number of frames."""
    if frames == 0:
        return [[]]
    return [[*rest, last] for last in range(1, frames + 1) for rest in list_partitions(frames - last)]


def count_saved(is_static: list[list[bool]], lengths: list[int]) -> int:
    total, start = 0, 0
    for n in lengths:
        steps = is_static[start : start + n - 1]
        total += (n - 1) * sum(all(step[p] for step in steps) for p in range(len(is_static[0]))) if n > 1 else 0
        start += n
    return total


@each("max_length", [1024, 2, 1])
@each("seed", range(6))
def test_static_segments_save_the_most_tokens(seed: int, max_length: int) -> None:
    """Segments equal a brute-force search; among equal partitions, the last segments are shortest."""
    g = torch.Generator().manual_seed(seed)
    sizes = [(7, 3), (1, 5), (2, 2), (5, 5)]
    padded, mask = torch.ones(4, 6, 5), torch.zeros(4, 6, 5, dtype=torch.bool)
    videos = []
    for row, (frames, num_tokens) in enumerate(sizes):
        video = (torch.rand(frames - 1, num_tokens, generator=g) < (0.5, 0.8, 1.0)[seed % 3]).float()
        padded[row, : frames - 1, :num_tokens], mask[row, : frames - 1, :num_tokens] = video, True
        videos.append(video.bool().tolist())
    got = find_static_segment_ends(padded, mask, torch.tensor([f for f, _ in sizes]), 0.5, max_length)
    for row, ((frames, _), is_static) in enumerate(zip(sizes, videos, strict=True)):
        partitions = [lengths for lengths in list_partitions(frames) if max(lengths) <= max_length]
        best = max(
            partitions, key=lambda lengths: (count_saved(is_static or [[False]], lengths), [-n for n in lengths[::-1]])
        )
        ends, total = [], 0
        for n in best[:-1]:
            total += n
            ends.append(total - 1)
        assert got[row].nonzero().flatten().tolist() == ends


def test_static_video_is_one_segment() -> None:
    similarity, mask = torch.ones(1, 9, 4), torch.ones(1, 9, 4, dtype=torch.bool)
    assert not find_static_segment_ends(similarity, mask, torch.tensor([10]), 0.9).any()
    assert find_static_segment_ends(similarity.fill_(torch.nan), mask, torch.tensor([10]), 0.9).all()


def test_curvature() -> None:
    _, padded, mask, frames = make_videos(width=3)
    means = frame_means(padded, mask)
    got = curvature(means, frames)
    for row, num_frames in enumerate(frames.tolist()):
        path = [[x / math.hypot(*m) for x in m] for m in means[row, :num_frames].tolist()]
        for t in range(got.shape[1]):
            if t >= num_frames:
                want = 0.0
            elif t in (0, num_frames - 1):
                want = 1.0
            else:
                steps = [[b - a for a, b in zip(path[i], path[i + 1], strict=True)] for i in (t - 1, t)]
                want = 1 - naive_cosine(*steps)
            assert got[row, t] == pytest.approx(want, abs=1e-5)
    actual = curvature(torch.ones(1, 5, 3), torch.tensor([5]))
    assert torch.equal(actual, torch.ones(1, 5)), "all frames of a static video weigh the same"


# -- budgets -----------------------------------------------------------------------------------------------------------


def naive_shares(weight: list[float], total: int, limits: list[int], minimum: int) -> list[int]:
    first = [min(m, minimum) for m in limits]
    if sum(first) > total:
        first = [0] * len(limits)
    capacity = [m - f for m, f in zip(limits, first, strict=True)]
    total = min(total - sum(first), sum(capacity))
    exact = [Fraction(0)] * len(limits)
    open_frames = [i for i, r in enumerate(capacity) if r]
    weights = [Fraction(0) if w != w else Fraction(w) for w in weight]
    remaining = total
    while remaining and open_frames:
        total_weight = sum(weights[i] for i in open_frames)
        quota = {
            i: remaining * weights[i] / total_weight if total_weight else Fraction(remaining, len(open_frames))
            for i in open_frames
        }
        over = [i for i in open_frames if quota[i] > capacity[i]]
        if not over:
            for i in open_frames:
                exact[i] = quota[i]
            break
        for i in over:
            exact[i] = Fraction(capacity[i])
            remaining -= capacity[i]
            open_frames.remove(i)
    got = [math.floor(e) for e in exact]
    rest = sorted((i for i in range(len(limits)) if got[i] < capacity[i]), key=lambda i: (got[i] - exact[i], i))
    for i in rest[: total - sum(got)]:
        got[i] += 1
    return [f + n for f, n in zip(first, got, strict=True)]


def test_split_budget_by_largest_remainder() -> None:
    g = torch.Generator().manual_seed(0)
    for case in range(400):
        rows, frames = 3, 1 + case % 7
        weight = torch.rand(rows, frames, generator=g, dtype=torch.float64)
        if case % 4 == 0:
            weight = (weight * 3).round() / 2  # ties, and frames of weight 0
        if case % 9 == 0:
            weight[0, 0] = torch.nan
        limits = torch.randint(0, 8, (rows, frames), generator=g)
        total = torch.randint(0, 40, (rows,), generator=g)
        minimum = case % 3
        got = split_budget(weight, total, limits, minimum)
        for row in range(rows):
            want = naive_shares(weight[row].tolist(), int(total[row]), limits[row].tolist(), minimum)
            assert got[row].tolist() == want, (weight[row], total[row], limits[row], minimum)
            assert got[row].sum() == min(total[row], limits[row].sum())
            single = split_budget(weight[row : row + 1], total[row : row + 1], limits[row : row + 1], minimum)
            assert torch.equal(single[0], got[row])


def test_split_budget_with_ties_and_zero_weights() -> None:
    def split(weight: list[float], total: int, limits: list[int], minimum: int = 0) -> list[int]:
        return split_budget(torch.tensor([weight]), torch.tensor([total]), torch.tensor([limits]), minimum)[0].tolist()

    assert split([1, 1, 1, 1], 6, [9] * 4) == [2, 2, 1, 1]
    assert split([0, 0, 0], 4, [9] * 3) == [2, 1, 1]
    assert split([math.nan] * 3, 5, [9] * 3) == [2, 2, 1]
    assert split([1, 0, 0], 9, [4] * 3) == [4, 3, 2]  # the share above a frame's limit goes to other frames
    assert split([5, 1, 1], 3, [9] * 3, 1) == [1, 1, 1] and split([5, 1, 1], 2, [9] * 3, 1) == [2, 0, 0]
    assert split([1, 2], 9, [3, 3]) == [3, 3] and split([1, 2], 0, [3, 3]) == [0, 0]
    assert split([1e-30, 1, 0], 5, [9, 3, 0]) == [2, 3, 0]


def naive_shares_in_rounds(weight: list[float], total: int, limits: list[int]) -> list[int]:
    """Round first, cap afterwards, and share the surplus again among the frames with room left."""
    counts = [0] * len(limits)
    rest = min(total, sum(limits))
    while rest:
        open_frames = [i for i, limit in enumerate(limits) if counts[i] < limit]
        weights = {i: 0 if math.isnan(weight[i]) else Fraction(weight[i]) for i in open_frames}
        if not any(weights.values()):
            weights = dict.fromkeys(open_frames, 1)
        exact = {i: rest * Fraction(weights[i]) / sum(weights.values()) for i in open_frames}
        added = {i: math.floor(exact[i]) for i in open_frames}
        by_fraction = sorted(open_frames, key=lambda i: (added[i] - exact[i], i))
        for i in by_fraction[: rest - sum(added.values())]:
            added[i] += 1
        for i in open_frames:
            counts[i] += added[i]
        rest = sum(max(0, count - limit) for count, limit in zip(counts, limits, strict=True))
        counts = [min(count, limit) for count, limit in zip(counts, limits, strict=True)]
    return counts


def test_split_budget_in_rounds_matches_the_loop() -> None:
    g = torch.Generator().manual_seed(0)
    differ = 0
    for case in range(400):
        rows, frames = 3, 1 + case % 9
        weight = (-torch.rand(rows, frames, generator=g, dtype=torch.float64) * (1 + case % 4)).softmax(1)
        if case % 9 == 0:
            weight[0, 0] = torch.nan
        limits = torch.randint(0, 8, (rows, frames), generator=g)
        total = torch.randint(0, 40, (rows,), generator=g)
        counts = split_budget_in_rounds(weight, total, limits)
        assert torch.equal(counts.sum(1), torch.minimum(total, limits.sum(1)))
        for row in range(rows):
            want = naive_shares_in_rounds(weight[row].tolist(), int(total[row]), limits[row].tolist())
            assert counts[row].tolist() == want, (weight[row], total[row], limits[row])
            single = split_budget_in_rounds(weight[row : row + 1], total[row : row + 1], limits[row : row + 1])
            assert torch.equal(single[0], counts[row])
        differ += not torch.equal(counts, split_budget(weight, total, limits))
    assert differ > 20, "the cases must reach limits where rounding first matters"


def test_split_budget_in_rounds_rounds_before_the_limit() -> None:
    """3.5, 2.1, 1.4 round to 4, 2, 1; the surplus of 1 goes to the larger of the weights 0.3 and 0.2."""
    weight, total, limits = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([7]), torch.full((1, 3), 3)
    assert split_budget_in_rounds(weight, total, limits).tolist() == [[3, 3, 1]]
    assert split_budget(weight, total, limits).tolist() == [[3, 2, 2]]


# -- clusters ----------------------------------------------------------------------------------------------------------


def naive_peaks(points: list[list[float]], num_peaks: int, neighbours: int) -> list[int]:
    usable = [i for i, point in enumerate(points) if all(map(math.isfinite, point))]
    distance = {(i, j): math.dist(points[i], points[j]) / len(points[0]) ** 0.5 for i in usable for j in usable}
    density, score = {}, {}
    for i in usable:
        nearest = sorted(distance[i, j] ** 2 for j in usable)[:neighbours]
        density[i] = -math.fsum(nearest) / len(nearest)
    for i in usable:
        denser = [j for j in usable if (density[j], -j) > (density[i], -i)]
        peak = min(distance[i, j] for j in denser) if denser else max(distance[i, j] for j in usable)
        score[i] = math.exp(density[i]) * peak
    order = sorted(usable, key=lambda i: (-score[i], i)) + [i for i in range(len(points)) if i not in usable]
    return sorted(order[:num_peaks])


@each("neighbours", [1, 4, 50])
@each("num_peaks", [1, 3, 7])
def test_peaks_of_density(num_peaks: int, neighbours: int) -> None:
    g = torch.Generator().manual_seed(num_peaks)
    counts = [20, 9, 12]
    x = torch.full((3, 20, 3), 2.0)
    for row, count in enumerate(counts):
        x[row, :count] = torch.randn(count, 3, generator=g, dtype=torch.float64).float()
    x[1, 3] = torch.nan
    mask = torch.arange(20) < torch.tensor(counts)[:, None]
    got = density_peaks(x, mask, torch.full((3,), num_peaks), neighbours, num_peaks)
    for row, count in enumerate(counts):
        assert got[row].nonzero().flatten().tolist() == naive_peaks(x[row, :count].tolist(), num_peaks, neighbours)


def test_peaks_of_equal_points() -> None:
    """Mutual nearest neighbours give one centre; duplicates come last, then non-finite points."""
    pairs = torch.tensor([[[0.0], [1.0], [10.0], [11.0]]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert density_peaks(pairs, mask, torch.tensor([2]), 2, 2)[0].tolist() == [True, False, True, False]
    duplicates = torch.tensor([[[math.nan], [3.0], [3.0], [3.0]]])
    assert density_peaks(duplicates, mask, torch.tensor([3]), 2, 3)[0].tolist() == [False, True, True, True]
    # exp(-distance^2) underflows to 0 here: the pair stays denser than the isolated point.
    far = torch.tensor([[[5e4], [0.0], [1e3], [9e4]]])
    assert density_peaks(far, mask, torch.tensor([2]), 2, 2)[0].tolist() == [False, True, True, False]


# -- exact counts ------------------------------------------------------------------------------------------------------


def naive_settle(keep: list[bool], score: list[float], count: int) -> list[int]:
    def better(i: int) -> tuple[float, int]:
        return (math.inf if score[i] != score[i] else -score[i], i)

    kept = sorted((i for i, k in enumerate(keep) if k), key=better)
    dropped = sorted((i for i, k in enumerate(keep) if not k), key=better)
    return sorted((kept + dropped)[:count])


@pytest.mark.parametrize("seed", range(5))
def test_adjust_count(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    counts = [12, 5, 9, 1]
    mask = torch.arange(12) < torch.tensor(counts)[:, None]
    keep = torch.rand(4, 12, generator=g) < 0.5  # includes padding
    score = (torch.rand(4, 12, generator=g) * 4).round()  # ties
    score[0, 3], score[1, :2], score[2, 4], score[2, 5] = torch.nan, torch.nan, -torch.inf, torch.inf
    for share in (0.01, 0.3, 0.6, 1.0):
        num_kept = torch.tensor([max(1, round(share * n)) for n in counts])
        got = adjust_count(keep, score, mask, num_kept)
        for row, count in enumerate(counts):
            want = naive_settle(keep[row, :count].tolist(), score[row, :count].tolist(), int(num_kept[row]))
            assert got[row].nonzero().flatten().tolist() == want
    exact = torch.tensor([int((keep & mask)[row].sum()) for row in range(4)])
    assert torch.equal(adjust_count(keep, score, mask, exact), keep & mask)
