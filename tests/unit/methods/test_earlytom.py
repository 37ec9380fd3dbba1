# SPDX-License-Identifier: Apache-2.0
"""earlytom on synthetic frames, against a loop; the numbers refer to the invariants of its description."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from naive_frames import chosen, mix, mixed, segments
from tokenprune import OptionError
from tokenprune.selection import FrameMix

PLACES, WIDTH = 5, 8


def walk(frames: int, seed: int = 0, step: float = 0.4) -> Tensor:
    """A video `[F, N, D]` that moves on, now fast and now slowly."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.randn(frames, PLACES, WIDTH, generator=g) * torch.rand(frames, 1, 1, generator=g) * step
    return torch.randn(PLACES, WIDTH, generator=g) + steps.cumsum(0)


def method(**options: Any) -> Any:
    return tokenprune.method("earlytom", **options)


def parts_of(found: FrameMix) -> list[list[tuple[int, float]]]:
    each = zip(found.first, found.second, found.weight, strict=True)
    return [[(a, 1.0)] if a == b else [(a, w), (b, 1 - w)] for a, b, w in each]


@each("lose_last", [False, True])
@each("longest", [1, 2, 4, 5, 12])
def test_merged_frames_match_loop(longest: int, lose_last: bool) -> None:
    pairs = 0
    for frames, seed, step, threshold in product(
        (1, 2, 3, 4, 5, 16), range(3), (0.1, 0.5, 2.0), (-1.0, 0.5, 0.9, 1.01)
    ):
        video = walk(frames, seed, step)
        one = method(longest=longest, threshold=threshold, lose_last=lose_last)
        want = mix(video.double(), threshold, longest + 1, lose_last)
        found = one.mix(video)
        got = parts_of(found)
        assert [[f for f, _ in part] for part in got] == [[f for f, _ in part] for part in want]
        assert torch.allclose(found.apply(video), mixed(video.double(), want).float(), atol=1e-5)
        assert one.groups(video) == [len(part) for part in segments(video.double(), threshold, longest + 1)]
        pairs += sum(len(part) == 2 for part in want)
    assert pairs > 0 or longest < 4 or (longest == 4 and lose_last)


def test_segment_ends_are_kept() -> None:
    """2, 3 and 4: segments respect `longest`, their ends are bit-equal, and the weights of a frame sum to one."""
    for seed in range(6):
        video, one = walk(16, seed), method(threshold=-1.0, longest=6)
        sizes, found = one.groups(video), one.mix(video)
        assert sizes == [6, 6, 4] and found.first == sorted(set(found.first))
        ends = [0, 5, 6, 11, 12, 15]
        left = found.apply(video)
        for end in ends:
            assert torch.equal(left[found.first.index(end)], video[end])
        assert all(0 <= w <= 1 for w in found.weight)
        half = found.apply(torch.ones(16, 3))
        assert torch.equal(half, torch.ones(len(found.first), 3))


def test_static_video_keeps_frames() -> None:
    """5: no neighbours are more similar than the ends, independent of rounding."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        still = torch.randn(1, 33, generator=g) * (0.5 + torch.rand(8, 1, 1, generator=g))
        assert method(longest=8).mix(still).first == list(range(8))
        assert method(longest=8, lose_last=True).mix(still).first == [0, 1, 2, 3, 4, 5, 7]


def test_lose_last_drops_unpaired_frame() -> None:
    """11: two frames between the ends give one in the authors' code, whether they are alike or not."""
    angles = {"alike": [0.0, 0.7, 0.8, 1.5], "unlike": [0.0, 1.5, 3.0, 0.1]}
    for name, angle in angles.items():
        at = torch.tensor(angle)
        video = torch.stack([at.cos(), at.sin()], 1)[:, None]
        assert method(threshold=-1.0, lose_last=True).mix(video) == FrameMix([0, 1, 3], [0, 1, 3], [1.0] * 3)
        ours = method(threshold=-1.0).mix(video)
        if name == "alike":
            assert ours == FrameMix([0, 1, 3], [0, 2, 3], [1.0, 0.5, 1.0])
        else:
            assert ours.first == [0, 1, 2, 3]
    assert FrameMix([0, 1, 3], [0, 1, 3], [1.0] * 3).find_owners(4) == [0, 1, 1, 2]


@pytest.mark.parametrize("places", [4, 9, 49])
def test_tokens_match_loop(places: int) -> None:
    g = torch.Generator().manual_seed(0)
    for sizes in ([1], [2, 1], [3], [5, 2, 4], [1, 1, 6]):
        frames = sum(sizes)
        received = torch.rand(frames, places, generator=g).mul(8).round().div(8)  # with equal ones
        groups = [list(range(sum(sizes[:n]), sum(sizes[: n + 1]))) for n in range(len(sizes))]
        for keep in sorted({1, frames, frames * places // 3 + 1, frames * places - 1, frames * places, 10**6}):
            keep_mask = method().choose_tokens(received, sizes, keep)
            assert [tuple(one) for one in keep_mask.nonzero().tolist()] == chosen(received, groups, keep)
            assert int(keep_mask.sum()) == min(keep, frames * places)


def test_nan_scores_do_not_fail() -> None:
    video = walk(6)
    video[2, 1, 3] = torch.nan
    assert method(threshold=-1.0).mix(video).first[0] == 0
    received = torch.full((4, 9), torch.nan)
    received[1, 5] = 1.0
    keep = method().choose_tokens(received, [4], 8)
    assert int(keep.sum()) == 8 and keep[1, 5]


def test_layers_as_shares_and_indices() -> None:
    assert method().blocks(26) == [8, 21, 23] and method().blocks(3) == [1, 2] and method().blocks(1) == [0]
    assert method(layers=(6, 21, 23)).blocks(26) == [6, 21, 23] and method(layers=(0.0, 1.0)).blocks(4) == [0, 3]
    with pytest.raises(OptionError, match=r"layers=\(6, 21, 23\).*reads 12 blocks"):
        method(layers=(6, 21, 23)).blocks(12)
