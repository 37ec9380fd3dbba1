# SPDX-License-Identifier: Apache-2.0
"""earlytom on synthetic frames, against a naive loop. Numbers in docstrings are invariants of its description."""

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

FRAME_TOKENS, WIDTH = 5, 8


def draw_walk(frames: int, seed: int = 0, step: float = 0.4) -> Tensor:
    """Return a video (frames, tokens, channels) that changes at varying speed."""
    g = torch.Generator().manual_seed(seed)
    steps = torch.randn(frames, FRAME_TOKENS, WIDTH, generator=g) * torch.rand(frames, 1, 1, generator=g) * step
    return torch.randn(FRAME_TOKENS, WIDTH, generator=g) + steps.cumsum(0)


def method(**options: Any) -> Any:
    return tokenprune.method("earlytom", **options)


def parts_of(frame_mix: FrameMix) -> list[list[tuple[int, float]]]:
    frames = zip(frame_mix.first, frame_mix.second, frame_mix.weight, strict=True)
    return [[(a, 1.0)] if a == b else [(a, w), (b, 1 - w)] for a, b, w in frames]


@each("lose_last", [False, True])
@each("longest", [1, 2, 4, 5, 12])
def test_merged_frames_match_loop(longest: int, lose_last: bool) -> None:
    pairs = 0
    for frames, seed, step, threshold in product(
        (1, 2, 3, 4, 5, 16), range(3), (0.1, 0.5, 2.0), (-1.0, 0.5, 0.9, 1.01)
    ):
        video = draw_walk(frames, seed, step)
        merger = method(longest=longest, threshold=threshold, lose_last=lose_last)
        want = mix(video.double(), threshold, longest + 1, lose_last)
        frame_mix = merger.mix(video)
        got = parts_of(frame_mix)
        assert [[f for f, _ in part] for part in got] == [[f for f, _ in part] for part in want]
        assert torch.allclose(frame_mix.apply(video), mixed(video.double(), want).float(), atol=1e-5)
        assert merger.groups(video) == [len(part) for part in segments(video.double(), threshold, longest + 1)]
        pairs += sum(len(part) == 2 for part in want)
    assert pairs > 0 or longest < 4 or (longest == 4 and lose_last)


def test_segment_ends_are_kept() -> None:
    """2, 3 and 4: segments have at most `longest` frames, their ends are bit-equal, and weights sum to 1."""
    for seed in range(6):
        video, merger = draw_walk(16, seed), method(threshold=-1.0, longest=6)
        sizes, frame_mix = merger.groups(video), merger.mix(video)
        assert sizes == [6, 6, 4] and frame_mix.first == sorted(set(frame_mix.first))
        ends = [0, 5, 6, 11, 12, 15]
        merged = frame_mix.apply(video)
        for end in ends:
            assert torch.equal(merged[frame_mix.first.index(end)], video[end])
        assert all(0 <= w <= 1 for w in frame_mix.weight)
        constant = frame_mix.apply(torch.ones(16, 3))
        assert torch.equal(constant, torch.ones(len(frame_mix.first), 3))


def test_static_video_keeps_frames() -> None:
    """5: no neighbours are more similar than the ends of a segment, also with rounding errors."""
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        still = torch.randn(1, 33, generator=g) * (0.5 + torch.rand(8, 1, 1, generator=g))
        assert method(longest=8).mix(still).first == list(range(8))
        assert method(longest=8, lose_last=True).mix(still).first == [0, 1, 2, 3, 4, 5, 7]


def test_lose_last_drops_unpaired_frame() -> None:
    """11: the authors' code reduces two frames between the ends to one frame, for any similarity."""
    angles = {"alike": [0.0, 0.7, 0.8, 1.5], "unlike": [0.0, 1.5, 3.0, 0.1]}
    for name, angle in angles.items():
        radians = torch.tensor(angle)
        video = torch.stack([radians.cos(), radians.sin()], 1)[:, None]
        assert method(threshold=-1.0, lose_last=True).mix(video) == FrameMix([0, 1, 3], [0, 1, 3], [1.0] * 3)
        ours = method(threshold=-1.0).mix(video)
        if name == "alike":
            assert ours == FrameMix([0, 1, 3], [0, 2, 3], [1.0, 0.5, 1.0])
        else:
            assert ours.first == [0, 1, 2, 3]
    assert FrameMix([0, 1, 3], [0, 1, 3], [1.0] * 3).find_owners(4) == [0, 1, 1, 2]


@pytest.mark.parametrize("num_tokens", [4, 9, 49])
def test_tokens_match_loop(num_tokens: int) -> None:
    g = torch.Generator().manual_seed(0)
    for sizes in ([1], [2, 1], [3], [5, 2, 4], [1, 1, 6]):
        frames = sum(sizes)
        received = torch.rand(frames, num_tokens, generator=g).mul(8).round().div(8)  # with ties
        groups = [list(range(sum(sizes[:n]), sum(sizes[: n + 1]))) for n in range(len(sizes))]
        for keep in sorted(
            {1, frames, frames * num_tokens // 3 + 1, frames * num_tokens - 1, frames * num_tokens, 10**6}
        ):
            keep_mask = method().choose_tokens(received, sizes, keep)
            assert [tuple(index) for index in keep_mask.nonzero().tolist()] == chosen(received, groups, keep)
            assert int(keep_mask.sum()) == min(keep, frames * num_tokens)


def test_nan_scores_do_not_fail() -> None:
    video = draw_walk(6)
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
