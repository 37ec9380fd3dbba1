# SPDX-License-Identifier: Apache-2.0
"""sttm on grids of several levels, against a recursive reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tokenprune
from each import each
from tests.unit.methods.naive.sttm import naive
from videos import given, same, select, shares_of

GRIDS = [(6, 6), (7, 7), (5, 9), (14, 13), (8, 3)]


def draw_scene(frames: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return a video with a background of four colours, noise, and a moving object of 2 x 2 patches."""
    g = torch.Generator().manual_seed(seed)
    colours = torch.randn(2, 2, 12, generator=g)
    background = colours[torch.arange(height)[:, None] * 2 // height, torch.arange(width) * 2 // width]
    video = background + 0.3 * torch.randn(frames, height, width, 12, generator=g)
    for frame in range(frames):
        column = frame % (width - 1)
        video[frame, 1:3, column : column + 2] += 3
    return video.flatten(1, 2)


def select_by_content(video: torch.Tensor, grid: tuple[int, int], **options: Any) -> dict[int, dict[int, float]]:
    count = video.shape[0] * video.shape[1]
    selection = tokenprune.method("sttm", exact=False, **options).select(given([video], [count - 1], [grid]))
    assert selection.counts is None
    return shares_of(selection, 0, count)


@each("grid", GRIDS)
def test_matches_recursion(grid: tuple[int, int]) -> None:
    video = draw_scene(3, *grid)
    for spatial, temporal in ((0.85, 0.55), (0.95, 0.9), (0.7, 0.0), (1.5, 0.8)):
        options = {"spatial": spatial, "temporal": temporal}
        got = select_by_content(video, grid, **options)
        same(got, naive(video, None, 1, grid, exact=False, **options))
        assert sorted(i for group in got.values() for i in group) == [*range(3 * grid[0] * grid[1])]


@each("grid", GRIDS)
def test_exact_counts_in_batch(grid: tuple[int, int]) -> None:
    videos = [draw_scene(2, *grid), draw_scene(3, *grid, seed=1)]
    for share in (0.02, 0.3, 0.8):
        keep = [max(1, int(share * video[..., 0].numel())) for video in videos]
        selection = select("sttm", given(videos, keep, [grid, grid]))
        for row, video in enumerate(videos):
            same(shares_of(selection, row, video[..., 0].numel()), naive(video, None, keep[row], grid))


def test_uniform_frame_becomes_coarsest_squares() -> None:
    """A 14 x 14 frame becomes 4 x 4 squares. A static video keeps only the squares of its first frame."""
    frame = torch.randn(12, generator=torch.Generator().manual_seed(0)).expand(1, 196, 12)
    edges = {14 * r + c for r in (0, 2, 6, 10) for c in (0, 2, 6, 10)}
    assert select_by_content(frame, (14, 14)).keys() == edges
    assert select_by_content(frame.repeat(3, 1, 1), (14, 14)).keys() == edges
    separate = select_by_content(frame.repeat(3, 1, 1), (14, 14), temporal=0.0)
    assert len(separate) == 48 and {len(group) for group in separate.values()} == {4, 8, 16}


def test_only_moving_parts_of_later_frames_are_kept() -> None:
    g = torch.Generator().manual_seed(0)
    frame = torch.randn(36, 12, generator=g)
    video, moved = frame.repeat(2, 1, 1), [14, 15, 20, 21]
    video[1, moved] = torch.randn(4, 12, generator=g)
    got = select_by_content(video, (6, 6), spatial=1.5, temporal=0.95)
    assert {i - 36 for i in got if i >= 36} == set(moved)


def test_mean_is_over_squares() -> None:
    """If a square of four tokens merges with one token of the next frame, both have half of the weight."""
    g = torch.Generator().manual_seed(0)
    video = torch.randn(2, 36, 12, generator=g)
    video[0, [0, 1, 6, 7]] = video[1, 7] = video[0, 0].clone()
    group = select_by_content(video, (6, 6), spatial=0.99, temporal=0.99)[0]
    assert group == {0: 0.125, 1: 0.125, 6: 0.125, 7: 0.125, 43: 0.5}


def test_rounds_stop_early() -> None:
    """If four tokens match one square of the next frame, only the first merges with it."""
    a, b = torch.eye(12)[:2]
    video = torch.eye(12).repeat(3, 1).flip(0)[None].repeat(2, 1, 1)
    video[0, [0, 6]], video[0, [1, 7]], video[1, [0, 1, 6, 7]] = a + 0.4 * b, a - 0.4 * b, a
    got = select_by_content(video, (6, 6), spatial=0.999, temporal=0.9)
    assert got[0].keys() == {0, 36, 37, 42, 43} and got.keys() >= {1, 6, 7}


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_zeros_and_nan_are_similar_to_nothing(bad: float) -> None:
    video = draw_scene(2, 6, 6)
    video[:, 8] = bad
    got = select_by_content(video, (6, 6), spatial=0.5, temporal=0.5)
    assert 44 in got and all(weight > 0 for group in got.values() for weight in group.values())
    assert len(shares_of(select("sttm", given([video], [20], [(6, 6)])), 0, 72)) == 20


def test_bfloat16() -> None:
    video = draw_scene(3, 6, 6).bfloat16().float()
    single, half = (select("sttm", given([video], [30], [(6, 6)], dtype=d)) for d in (torch.float32, torch.bfloat16))
    assert torch.equal(single.assign, half.assign)
