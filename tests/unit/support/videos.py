# SPDX-License-Identifier: Apache-2.0
"""Made-up videos for methods that compare frames: a still background and a moving object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tokenprune
from tokenprune import Selection, VisualTokens
from tokenprune.selection.segments import Patches
from tokenprune.testing import visual_tokens

WIDTH = 12


def moving(frames: int, height: int, width: int, seed: int = 0, noise: float = 0.02, cut: int | None = None) -> Tensor:
    """Return a float32 video `[frames, height * width, WIDTH]`: a still background with noise, an object of one column
    that moves over it, and another background from frame `cut` on."""
    g = torch.Generator().manual_seed(seed)
    ground = torch.randn(2, height * width, WIDTH, generator=g)
    moving_object = torch.randn(height, WIDTH, generator=g) * 2
    video = torch.stack([ground[int(cut is not None and frame >= cut)] for frame in range(frames)])
    video = video + noise * torch.randn(video.shape, generator=g)
    for frame in range(frames):
        video[frame, torch.arange(height) * width + frame % width] += moving_object
    return video


def attention_of(video: Tensor, seed: int = 0) -> Tensor:
    """Return float32 attention `[frames, patches]`. Each frame sums to 1."""
    g = torch.Generator().manual_seed(1000 + seed)
    return torch.rand(video.shape[:2], generator=g).softmax(1)


def given(
    videos: list[Tensor], keep: list[int], grids: list[tuple[int, int]], newline: bool = False, dtype: Any = None,
    attention: list[Tensor] | None = None, **more: Any,
) -> VisualTokens:  # fmt: skip
    """Build the tokens of a batch of videos, one per row. grids: (height, width) of each. newline: add a token after
    each video."""
    counts = [video.shape[0] * video.shape[1] + newline for video in videos]
    hidden = torch.full((len(videos), max(counts), videos[0].shape[-1]), 9.0)
    scores = torch.zeros(len(videos), 2, max(counts))
    cells = torch.zeros(6, len(videos), max(counts), dtype=torch.long)
    cells[0], cells[3:] = -1, 1
    attention = [attention_of(video, row) for row, video in enumerate(videos)] if attention is None else attention
    for row, (video, (height, width)) in enumerate(zip(videos, grids, strict=True)):
        frames, num_patches = video.shape[:2]
        hidden[row, : frames * num_patches] = video.flatten(0, 1)
        scores[row, :, : frames * num_patches] = attention[row].flatten() * torch.tensor([[0.5], [1.5]])
        for i in range(frames * num_patches):
            patch = i % num_patches
            cells[:, row, i] = torch.tensor([i // num_patches, patch // width, patch % width, height, width, 1])
    hidden = more.pop("hidden", hidden)
    return visual_tokens(
        hidden if dtype is None else hidden.to(dtype), counts, keep=keep, modality="video",
        grids=[None if newline else (len(v), *grid) for v, grid in zip(videos, grids, strict=True)],
        frames=[[video.shape[1]] * len(video) for video in videos],
        **{"encoder_attention": {-1: scores}, "patches": Patches(*cells, tiles=max(map(len, videos)))} | more,
    )  # fmt: skip


def select(method: str, tokens: VisualTokens, **options: Any) -> Selection:
    selection = tokenprune.method(method, **options).select(tokens)
    assert selection.keep.sum(1).tolist() == tokens.keep == list(selection.counts)
    return selection


def shares_of(selection: Selection, row: int, count: int) -> dict[int, dict[int, float]]:
    """Return, for each kept token of a video, its members and their weights, which sum to 1."""
    groups: dict[int, dict[int, float]] = {}
    for i, target in enumerate(selection.assign[row, :count].tolist()):
        if target >= 0:
            groups.setdefault(target, {})[i] = 1.0 if selection.weight is None else float(selection.weight[row, i])
    for target, group in groups.items():
        total = math.fsum(group.values())
        groups[target] = {i: weight / total for i, weight in group.items()}
    return groups


def same(actual: dict[int, dict[int, float]], expected: dict[int, dict[int, float]]) -> None:
    """Check that two results of merging are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for target, group in expected.items():
        assert actual[target].keys() == group.keys(), target
        for i, weight in group.items():
            assert math.isclose(actual[target][i], weight, abs_tol=1e-5), (target, i)


GRIDS = [(4, 5), (3, 3), (5, 4), (2, 6)]
FRAMES = [6, 1, 9, 2]


def compare(
    method: str, naive: Callable[..., dict[int, dict[int, float]]], share: float, cut: int | None, newline: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check that a batch of videos of different lengths merges like a naive loop, and like each video separately. A
    newline after a video is kept and counts. naive: takes a video, its attention, the budget, and its grid."""
    videos = [moving(f, *grid, seed=f, cut=cut) for f, grid in zip(FRAMES, GRIDS, strict=True)]
    counts = [video.shape[0] * video.shape[1] for video in videos]
    keep = [max(1, round(share * count)) for count in counts]
    selection = select(method, given(videos, [k + newline for k in keep], GRIDS, newline), **options)
    for row, (video, count) in enumerate(zip(videos, counts, strict=True)):
        attention = attention_of(video, row)
        groups = shares_of(selection, row, count + newline)
        assert not newline or groups.pop(count) == {count: 1.0}
        same(groups, naive(video, attention, keep[row], GRIDS[row]))
        if keep[row] < count:
            tokens = given([video], [keep[row] + newline], [GRIDS[row]], newline, attention=[attention])
            assert torch.equal(select(method, tokens, **options).assign[0], selection.assign[row, : count + newline])


def check_counts(method: str, frames: int, **options: Any) -> None:
    """Check that the budget is met exactly, and that the weights of each kept token are positive and sum to 1."""
    video = moving(frames, 3, 3, seed=frames)
    for keep in {1, max(1, frames - 1), frames, 9 * frames - 1, 9 * frames}:
        selection = select(method, given([video], [keep], [(3, 3)]), **options)
        if keep == 9 * frames:
            assert selection.keep.all() and selection.assign is None
            continue
        groups = shares_of(selection, 0, 9 * frames)
        assert len(groups) == keep
        for group in groups.values():
            assert min(group.values()) > 0 and math.isclose(sum(group.values()), 1, abs_tol=1e-6)


# -- in plain Python ---------------------------------------------------------------------------------------------------


def cos(a: list[float], b: list[float]) -> float:
    length = math.hypot(*a) * math.hypot(*b)
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / length if length > 0 else 0.0


def mean(vectors: list[list[float]]) -> list[float]:
    return [math.fsum(values) / len(vectors) for values in zip(*vectors, strict=True)]


def best(indices: Any, score: Any, count: int) -> list[int]:
    """Return the `count` indices with the highest scores, the first of equal scores."""
    return sorted(indices, key=lambda i: (-score[i], i))[: max(0, count)]


def clusters(points: dict[int, list[float]], count: int) -> dict[int, int]:
    """Return the nearest center of each point by DPC-KNN, or an empty dict without centers."""
    distances = {(i, j): math.dist(points[i], points[j]) for i in points for j in points}
    density, score = {}, {}
    for i in points:
        nearest = sorted(distances[i, j] ** 2 for j in points)[: min(7, count)]
        density[i] = -math.fsum(nearest) / max(1, len(nearest)) / len(points[i])
    for i in points:
        denser = [j for j in points if (density[j], -j) > (density[i], -i)]
        peak = min(distances[i, j] for j in denser) if denser else max(distances[i, j] for j in points)
        score[i] = math.exp(density[i]) * peak
    centres = best(points, score, count)
    if not centres:
        return {}
    return {i: i if i in centres else min(centres, key=lambda j: (distances[i, j], j)) for i in points}
