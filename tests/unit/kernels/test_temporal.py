# SPDX-License-Identifier: Apache-2.0
"""What is computed of frames, against naive loops; ragged batches give what their videos give alone."""

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

VIDEOS = [(5, 4), (1, 6), (3, 1), (2, 5)]  # frames and places of each


def made_up(seed: int = 0, width: int = 6) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Videos `[F, P, D]`, and all of them with padding that is not zero, its mask, and their frames."""
    g = torch.Generator().manual_seed(seed)
    videos = [torch.randn(frames, places, width, generator=g) for frames, places in VIDEOS]
    most = [max(sizes) for sizes in zip(*VIDEOS, strict=True)]
    padded = torch.full((len(videos), *most, width), 7.0)
    mask = torch.zeros(padded.shape[:3], dtype=torch.bool)
    for row, video in enumerate(videos):
        padded[row, : video.shape[0], : video.shape[1]] = video
        mask[row, : video.shape[0], : video.shape[1]] = True
    return videos, padded, mask, torch.tensor([frames for frames, _ in VIDEOS])


def naive_cosine(a: list[float], b: list[float]) -> float:
    length = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / length if length > 0 else 0.0


def test_group_by_frame() -> None:
    videos, padded, mask, _ = made_up()
    rows = [[(f, p) for f in range(frames) for p in range(places)] for frames, places in VIDEOS]
    rows[2].append((-1, -1))  # a newline behind the last frame
    width = max(map(len, rows))
    x = torch.full((len(rows), width, 6), 9.0)
    frame, place = torch.full((len(rows), width), -1), torch.full((len(rows), width), -1)
    for row, (spots, video) in enumerate(zip(rows, videos, strict=True)):
        for i, (f, p) in enumerate(spots):
            frame[row, i], place[row, i] = f, p
            x[row, i] = video[f, p] if f >= 0 else 5.0
    dense, there = group_by_frame(x, frame, place, *padded.shape[1:3])
    assert torch.equal(there, mask) and torch.equal(dense, padded.masked_fill(~mask[..., None], 0))
    scores, _ = group_by_frame(x[..., 0], frame, place, *padded.shape[1:3])
    assert torch.equal(scores, dense[..., 0])


def test_similarity_to_the_frame_before() -> None:
    videos, padded, mask, _ = made_up()
    padded[0, 2, 1] = 0  # similar to nothing
    padded[0, 3, 2, 0] = torch.nan
    videos[0] = padded[0, :5, :4]
    got = previous_frame_similarity(padded, mask)
    assert got.dtype == torch.float32 and previous_frame_similarity(padded.half(), mask).dtype == torch.float32
    want = torch.zeros_like(got)
    for row, video in enumerate(videos):
        for f, p in product(range(1, video.shape[0]), range(video.shape[1])):
            broken = video[f, p].isnan().any() or video[f - 1, p].isnan().any()
            want[row, f - 1, p] = 0 if broken else naive_cosine(video[f, p].tolist(), video[f - 1, p].tolist())
    torch.testing.assert_close(got, want)
    assert not got[0, 1:3, 1].any() and not got[0, 2:, 2].any()


def test_means_of_frames() -> None:
    videos, padded, mask, _ = made_up()
    got = frame_means(padded, mask)
    for row, video in enumerate(videos):
        torch.testing.assert_close(got[row, : len(video)], video.mean(1))
        assert not got[row, len(video) :].any()


# -- segments ----------------------------------------------------------------------------------------------------------


def naive_segments(values: list[float], least: int, threshold: float) -> list[bool]:
    worst = sorted(range(len(values)), key=lambda i: (-math.inf if values[i] != values[i] else values[i], i))
    return [i in worst[: least - 1] or not values[i] >= threshold for i in range(len(values))]


@each("least", [1, 2, 4, 9])
@each("threshold", [-2.0, 0.3, 0.5, 2.0])
def test_segment_ends_by_threshold_and_count(least: int, threshold: float) -> None:
    rows = [[0.9, 0.1, 0.5, 0.1, 0.4], [0.2], [], [0.5, 0.5, 0.5], [0.6, math.nan, -1.0]]
    padded = torch.full((len(rows), 6), -5.0)  # padding is less similar than anything
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    got = find_segment_ends(padded, torch.tensor([len(row) + 1 for row in rows]), least, threshold)
    for i, row in enumerate(rows):
        assert got[i].tolist() == naive_segments(row, least, threshold) + [False] * (6 - len(row))


def partitions(frames: int) -> list[list[int]]:
    """The lengths of the segments of each way to cut so many frames."""
    if frames == 0:
        return [[]]
    return [[*rest, last] for last in range(1, frames + 1) for rest in partitions(frames - last)]


def saving(still: list[list[bool]], lengths: list[int]) -> int:
    total, start = 0, 0
    for n in lengths:
        steps = still[start : start + n - 1]
        total += (n - 1) * sum(all(step[p] for step in steps) for p in range(len(still[0]))) if n > 1 else 0
        start += n
    return total


@each("most", [1024, 2, 1])
@each("seed", range(6))
def test_static_segments_save_the_most_tokens(seed: int, most: int) -> None:
    """Of all partitions, by brute force; of equal ones the one whose last segments are shortest."""
    g = torch.Generator().manual_seed(seed)
    sizes = [(7, 3), (1, 5), (2, 2), (5, 5)]
    padded, mask = torch.ones(4, 6, 5), torch.zeros(4, 6, 5, dtype=torch.bool)
    videos = []
    for row, (frames, places) in enumerate(sizes):
        video = (torch.rand(frames - 1, places, generator=g) < (0.5, 0.8, 1.0)[seed % 3]).float()
        padded[row, : frames - 1, :places], mask[row, : frames - 1, :places] = video, True
        videos.append(video.bool().tolist())
    got = find_static_segment_ends(padded, mask, torch.tensor([f for f, _ in sizes]), 0.5, most)
    for row, ((frames, _), still) in enumerate(zip(sizes, videos, strict=True)):
        ways = [way for way in partitions(frames) if max(way) <= most]
        best = max(ways, key=lambda way: (saving(still or [[False]], way), [-n for n in way[::-1]]))
        ends, total = [], 0
        for n in best[:-1]:
            total += n
            ends.append(total - 1)
        assert got[row].nonzero().flatten().tolist() == ends


def test_static_video_is_one_segment() -> None:
    still, there = torch.ones(1, 9, 4), torch.ones(1, 9, 4, dtype=torch.bool)
    assert not find_static_segment_ends(still, there, torch.tensor([10]), 0.9).any()
    assert find_static_segment_ends(still.fill_(torch.nan), there, torch.tensor([10]), 0.9).all()


def test_curvature() -> None:
    _, padded, mask, frames = made_up(width=3)
    means = frame_means(padded, mask)
    got = curvature(means, frames)
    for row, number in enumerate(frames.tolist()):
        path = [[x / math.hypot(*m) for x in m] for m in means[row, :number].tolist()]
        for t in range(got.shape[1]):
            if t >= number:
                want = 0.0
            elif t in (0, number - 1):
                want = 1.0
            else:
                steps = [[b - a for a, b in zip(path[i], path[i + 1], strict=True)] for i in (t - 1, t)]
                want = 1 - naive_cosine(*steps)
            assert got[row, t] == pytest.approx(want, abs=1e-5)
    still = curvature(torch.ones(1, 5, 3), torch.tensor([5]))
    assert torch.equal(still, torch.ones(1, 5)), "a video that stands still turns nowhere: all frames are alike"


# -- budgets -----------------------------------------------------------------------------------------------------------


def naive_shares(weight: list[float], total: int, most: list[int], least: int) -> list[int]:
    first = [min(m, least) for m in most]
    if sum(first) > total:
        first = [0] * len(most)
    room = [m - f for m, f in zip(most, first, strict=True)]
    total = min(total - sum(first), sum(room))
    exact = [Fraction(0)] * len(most)
    open_ = [i for i, r in enumerate(room) if r]
    weights = [Fraction(0) if w != w else Fraction(w) for w in weight]
    left = total
    while left and open_:
        whole = sum(weights[i] for i in open_)
        quota = {i: left * weights[i] / whole if whole else Fraction(left, len(open_)) for i in open_}
        over = [i for i in open_ if quota[i] > room[i]]
        if not over:
            for i in open_:
                exact[i] = quota[i]
            break
        for i in over:
            exact[i] = Fraction(room[i])
            left -= room[i]
            open_.remove(i)
    got = [math.floor(e) for e in exact]
    rest = sorted((i for i in range(len(most)) if got[i] < room[i]), key=lambda i: (got[i] - exact[i], i))
    for i in rest[: total - sum(got)]:
        got[i] += 1
    return [f + n for f, n in zip(first, got, strict=True)]


def test_split_budget_by_largest_remainder() -> None:
    g = torch.Generator().manual_seed(0)
    for case in range(400):
        rows, frames = 3, 1 + case % 7
        weight = torch.rand(rows, frames, generator=g, dtype=torch.float64)
        if case % 4 == 0:
            weight = (weight * 3).round() / 2  # ties, and frames that weigh nothing
        if case % 9 == 0:
            weight[0, 0] = torch.nan
        most = torch.randint(0, 8, (rows, frames), generator=g)
        total = torch.randint(0, 40, (rows,), generator=g)
        least = case % 3
        got = split_budget(weight, total, most, least)
        for row in range(rows):
            want = naive_shares(weight[row].tolist(), int(total[row]), most[row].tolist(), least)
            assert got[row].tolist() == want, (weight[row], total[row], most[row], least)
            assert got[row].sum() == min(total[row], most[row].sum())
            alone = split_budget(weight[row : row + 1], total[row : row + 1], most[row : row + 1], least)
            assert torch.equal(alone[0], got[row])


def test_split_budget_with_ties_and_zero_weights() -> None:
    def one(weight: list[float], total: int, most: list[int], least: int = 0) -> list[int]:
        return split_budget(torch.tensor([weight]), torch.tensor([total]), torch.tensor([most]), least)[0].tolist()

    assert one([1, 1, 1, 1], 6, [9] * 4) == [2, 2, 1, 1]
    assert one([0, 0, 0], 4, [9] * 3) == [2, 1, 1]
    assert one([math.nan] * 3, 5, [9] * 3) == [2, 2, 1]
    assert one([1, 0, 0], 9, [4] * 3) == [4, 3, 2]  # what is above a frame's tokens goes to the others
    assert one([5, 1, 1], 3, [9] * 3, 1) == [1, 1, 1] and one([5, 1, 1], 2, [9] * 3, 1) == [2, 0, 0]
    assert one([1, 2], 9, [3, 3]) == [3, 3] and one([1, 2], 0, [3, 3]) == [0, 0]
    assert one([1e-30, 1, 0], 5, [9, 3, 0]) == [2, 3, 0]


def naive_shares_in_rounds(weight: list[float], total: int, most: list[int]) -> list[int]:
    """Round first, cap afterwards, and share the surplus again among the frames with room left."""
    counts = [0] * len(most)
    rest = min(total, sum(most))
    while rest:
        open_frames = [i for i, limit in enumerate(most) if counts[i] < limit]
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
        rest = sum(max(0, count - limit) for count, limit in zip(counts, most, strict=True))
        counts = [min(count, limit) for count, limit in zip(counts, most, strict=True)]
    return counts


def test_split_budget_in_rounds_matches_the_loop() -> None:
    g = torch.Generator().manual_seed(0)
    differ = 0
    for case in range(400):
        rows, frames = 3, 1 + case % 9
        weight = (-torch.rand(rows, frames, generator=g, dtype=torch.float64) * (1 + case % 4)).softmax(1)
        if case % 9 == 0:
            weight[0, 0] = torch.nan
        most = torch.randint(0, 8, (rows, frames), generator=g)
        total = torch.randint(0, 40, (rows,), generator=g)
        counts = split_budget_in_rounds(weight, total, most)
        assert torch.equal(counts.sum(1), torch.minimum(total, most.sum(1)))
        for row in range(rows):
            want = naive_shares_in_rounds(weight[row].tolist(), int(total[row]), most[row].tolist())
            assert counts[row].tolist() == want, (weight[row], total[row], most[row])
            alone = split_budget_in_rounds(weight[row : row + 1], total[row : row + 1], most[row : row + 1])
            assert torch.equal(alone[0], counts[row])
        differ += not torch.equal(counts, split_budget(weight, total, most))
    assert differ > 20, "the cases must reach limits where rounding first matters"


def test_split_budget_in_rounds_rounds_before_the_limit() -> None:
    """3.5, 2.1, 1.4 round to 4, 2, 1; the surplus of 1 goes to the larger of the weights 0.3 and 0.2."""
    weight, total, most = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([7]), torch.full((1, 3), 3)
    assert split_budget_in_rounds(weight, total, most).tolist() == [[3, 3, 1]]
    assert split_budget(weight, total, most).tolist() == [[3, 2, 2]]


# -- clusters ----------------------------------------------------------------------------------------------------------


def naive_peaks(points: list[list[float]], number: int, neighbours: int) -> list[int]:
    usable = [i for i, point in enumerate(points) if all(map(math.isfinite, point))]
    apart = {(i, j): math.dist(points[i], points[j]) / len(points[0]) ** 0.5 for i in usable for j in usable}
    density, score = {}, {}
    for i in usable:
        near = sorted(apart[i, j] ** 2 for j in usable)[:neighbours]
        density[i] = -math.fsum(near) / len(near)
    for i in usable:
        denser = [j for j in usable if (density[j], -j) > (density[i], -i)]
        peak = min(apart[i, j] for j in denser) if denser else max(apart[i, j] for j in usable)
        score[i] = math.exp(density[i]) * peak
    order = sorted(usable, key=lambda i: (-score[i], i)) + [i for i in range(len(points)) if i not in usable]
    return sorted(order[:number])


@each("neighbours", [1, 4, 50])
@each("number", [1, 3, 7])
def test_peaks_of_density(number: int, neighbours: int) -> None:
    g = torch.Generator().manual_seed(number)
    counts = [20, 9, 12]
    x = torch.full((3, 20, 3), 2.0)
    for row, count in enumerate(counts):
        x[row, :count] = torch.randn(count, 3, generator=g, dtype=torch.float64).float()
    x[1, 3] = torch.nan
    mask = torch.arange(20) < torch.tensor(counts)[:, None]
    got = density_peaks(x, mask, torch.full((3,), number), neighbours, number)
    for row, count in enumerate(counts):
        assert got[row].nonzero().flatten().tolist() == naive_peaks(x[row, :count].tolist(), number, neighbours)


def test_peaks_of_equals() -> None:
    """Of mutual nearest neighbours one becomes a centre; duplicates come last, and what is not a number behind them."""
    pairs = torch.tensor([[[0.0], [1.0], [10.0], [11.0]]])
    there = torch.ones(1, 4, dtype=torch.bool)
    assert density_peaks(pairs, there, torch.tensor([2]), 2, 2)[0].tolist() == [True, False, True, False]
    same = torch.tensor([[[math.nan], [3.0], [3.0], [3.0]]])
    assert density_peaks(same, there, torch.tensor([3]), 2, 3)[0].tolist() == [False, True, True, True]
    # Points so far apart that exp(-distance^2) is 0 for each: the pair is denser than the lone one still.
    far = torch.tensor([[[5e4], [0.0], [1e3], [9e4]]])
    assert density_peaks(far, there, torch.tensor([2]), 2, 2)[0].tolist() == [False, True, True, False]


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
    keep = torch.rand(4, 12, generator=g) < 0.5  # of padding too
    score = (torch.rand(4, 12, generator=g) * 4).round()  # ties
    score[0, 3], score[1, :2], score[2, 4], score[2, 5] = torch.nan, torch.nan, -torch.inf, torch.inf
    for share in (0.01, 0.3, 0.6, 1.0):
        wanted = torch.tensor([max(1, round(share * n)) for n in counts])
        got = adjust_count(keep, score, mask, wanted)
        for row, count in enumerate(counts):
            want = naive_settle(keep[row, :count].tolist(), score[row, :count].tolist(), int(wanted[row]))
            assert got[row].nonzero().flatten().tolist() == want
    exact = torch.tensor([int((keep & mask)[row].sum()) for row in range(4)])
    assert torch.equal(adjust_count(keep, score, mask, exact), keep & mask)
