# SPDX-License-Identifier: Apache-2.0
"""pixelprune on synthetic grids of units, against a naive loop over units."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from tokenprune import Budget, OptionError
from tokenprune.methods.encoder.prediction import METRICS, Distances, predict_anchored, predict_from_neighbours
from tokenprune.testing import check_method

P = 12  # values of a unit
EVERYTHING = 10**6
DISTANCES = {
    "max": lambda a, b: np.abs(a - b).max(),
    "mae": lambda a, b: np.abs(a - b).mean(),
    "rmse": lambda a, b: np.sqrt(np.square(a - b).mean()),
}


def naive(pixels: Tensor, threshold: float, metric: str = "max", by_neighbours: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mask of kept units and the pixels that replace each unit."""
    frames, height, width, _ = pixels.shape
    keep = torch.ones(frames, height, width, dtype=torch.bool)
    x = pixels.numpy()
    replacement = x.copy()
    reference = x if by_neighbours else replacement

    def similar(a: np.ndarray, b: np.ndarray) -> bool:
        return bool(DISTANCES[metric](a, b) <= threshold * (1 + 1e-4))

    for t in range(frames):
        for r in range(height):
            for c in range(width):
                left = reference[t, r, c - 1] if c else None
                above = reference[t, r - 1, c] if r else None
                if left is not None and above is not None:
                    corner = reference[t, r - 1, c - 1]
                    predicted = above if similar(corner, left) and not similar(corner, above) else left
                else:
                    predicted = left if above is None else above
                previous = reference[t - 1, r, c] if t else None
                for candidate in (previous, predicted):
                    if candidate is not None and similar(x[t, r, c], candidate):
                        keep[t, r, c] = False
                        replacement[t, r, c] = candidate
                        break
    return keep, torch.from_numpy(replacement)


def draw_noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, P, generator=torch.Generator().manual_seed(seed))


def draw_levels(*shape: int, levels: int = 4, seed: int = 0) -> Tensor:
    """Return units of one colour each with small noise, so that many units are equal or nearly equal."""
    g = torch.Generator().manual_seed(seed)
    plain = torch.randint(levels, (*shape, 1), generator=g) / 10
    return (plain + 0.01 * torch.randint(2, (*shape, P), generator=g)).float()


def draw_page(height: int = 12, width: int = 10, frames: int = 1) -> Tensor:
    """Return a page: plain background, two boxes, and lines of 'words' with detail."""
    x = torch.ones(frames, height, width, P)
    x[:, 1:4, 1:5] = 0.3
    x[:, 2:9, 7:9] = 0.6
    x[:, 6, 1:6] = draw_noise(5)
    x[:, 9, 1:9] = draw_noise(8, seed=1)
    return x


GRIDS = {
    "page": draw_page(),
    "page of two frames": torch.cat([draw_page(), draw_page().roll(1, 2)]),
    "steps": draw_levels(1, 8, 6),
    "steps in frames": draw_levels(3, 4, 5, levels=2),
    "noise": draw_noise(1, 4, 5),
    "row": draw_levels(1, 1, 12, levels=2),
    "column": draw_levels(1, 12, 1, levels=2),
    "one": draw_noise(1, 1, 1),
    "frames of one": draw_levels(5, 1, 1, levels=1),
}


@pytest.fixture(params=GRIDS)
def grid(request: pytest.FixtureRequest) -> Tensor:
    return GRIDS[request.param]


@each("metric", METRICS)
@each("threshold", [0.0, 0.005, 0.02, 0.11, 0.5])
def test_both_forms_match_loop(grid: Tensor, threshold: float, metric: str) -> None:
    anchored = predict_anchored(grid, threshold, metric)
    want, replacement = naive(grid, threshold, metric)
    assert torch.equal(anchored.keep, want)
    assert torch.equal(grid.flatten(0, 2)[anchored.source.flatten()].view_as(grid), replacement)
    fast = predict_from_neighbours(Distances.from_pixels(grid, metric), threshold)
    assert torch.equal(fast.keep, naive(grid, threshold, metric, by_neighbours=True)[0])
    if threshold == 0:
        assert torch.equal(fast.keep, anchored.keep)
        assert torch.equal(fast.error, anchored.error)


def test_unanchored_drops_slow_gradient() -> None:
    ramp = (torch.arange(40) / 100)[None, None, :, None].expand(1, 1, 40, P)
    assert int(tokenprune.method("pixelprune", threshold=0.02, anchored=False).keep_units(ramp, EVERYTHING).sum()) == 1
    assert int(tokenprune.method("pixelprune", threshold=0.02).keep_units(ramp, EVERYTHING).sum()) == 14


def compute_keep(pixels: Tensor, max_units: int = EVERYTHING, **options: object) -> Tensor:
    return tokenprune.method("pixelprune", **options).keep_units(pixels, max_units)


def test_uniform_image_keeps_one_unit() -> None:
    keep = compute_keep(torch.full((1, 9, 7, P), 0.4))
    assert keep.nonzero().tolist() == [[0, 0, 0]]
    assert compute_keep(torch.full((4, 9, 7, P), 0.4)).nonzero().tolist() == [[0, 0, 0]]  # also for a static video


@pytest.mark.parametrize("size", [2, 5, 11])
def test_rectangle_keeps_corners(size: int) -> None:
    """Edges are predicted in both directions, so the number of kept units does not depend on the size."""
    x = torch.zeros(1, size + 4, size + 4, P)
    x[:, 2 : 2 + size, 2 : 2 + size] = 1
    end = 2 + size
    assert compute_keep(x).nonzero()[:, 1:].tolist() == [[0, 0], [2, 2], [2, end], [end, 2]]


def test_noise_keeps_all() -> None:
    assert compute_keep(draw_noise(1, 8, 9)).all() and compute_keep(draw_noise(3, 4, 5)).all()


def test_static_content_is_kept_once() -> None:
    frame = draw_noise(1, 6, 5)
    moved = frame.clone()
    moved[0, 2, 3] += 0.5
    keep = compute_keep(torch.cat([frame, frame, moved, frame]))
    assert [int(frame_keep.sum()) for frame_keep in keep] == [30, 0, 1, 1]


def test_larger_threshold_keeps_fewer() -> None:
    for pixels in (draw_page(), draw_levels(1, 9, 7), draw_noise(1, 6, 5), draw_levels(3, 5, 6)):
        counts = [int(compute_keep(pixels, threshold=tau).sum()) for tau in (0.0, 0.011, 0.1, 0.2, 0.35, 0.6, 1.0)]
        assert counts == sorted(counts, reverse=True) and counts[-1] == 1
        assert len(set(counts)) >= 3


@each(("name", "metric"), [*((name, "max") for name in GRIDS), ("page", "mae"), ("steps", "rmse")])
def test_bound_is_exact_if_exceeded(name: str, metric: str) -> None:
    grid = GRIDS[name]
    exact = compute_keep(grid, metric=metric)
    for max_units in {1, 2, grid[..., 0].numel() // 2 or 1, int(exact.sum()), EVERYTHING}:
        keep = compute_keep(grid, max_units, metric=metric)
        assert int(keep.sum()) == min(max_units, int(exact.sum()))
        assert bool(keep[0, 0, 0])
        assert not bool((keep & ~exact).any()) or max_units < int(exact.sum())
    assert torch.equal(compute_keep(grid, int(exact.sum()), metric=metric), exact)


def test_bound_drops_smallest_errors_first() -> None:
    """Faint texture is dropped before text. If errors are equal, the first units are kept."""
    x = torch.full((1, 6, 8, P), 0.9)
    x[0, 1:3] += 0.02 * draw_noise(2, 8)
    x[0, 4] = draw_noise(8, seed=3)
    keep = compute_keep(x, 10)
    assert keep[0, 4].all() and int(keep.sum()) == 10
    equal_steps = torch.zeros(1, 1, 9, P)
    equal_steps[0, 0, ::2] = 0.5
    assert compute_keep(equal_steps, 4)[0, 0].tolist() == [True] * 4 + [False] * 5  # ties: the first units are kept


def test_bound_spreads_over_gradient() -> None:
    ramp = (torch.arange(40) / 100)[None, None, :, None].expand(1, 1, 40, P)
    columns = compute_keep(ramp, 14)[0, 0].nonzero()[:, 0]
    assert len(columns) == 14 and int(torch.cat([columns, torch.tensor([40])]).diff().max()) <= 4


def test_threshold_with_bound() -> None:
    x = draw_levels(1, 9, 7)
    unbounded = compute_keep(x, threshold=0.02)
    assert torch.equal(compute_keep(x, 60, threshold=0.02), unbounded)
    assert int(compute_keep(x, 10, threshold=0.02).sum()) == 10 < int(unbounded.sum())


def test_normalised_colors_meet_threshold() -> None:
    """Normalization rounds colours. A step of exactly two of 255 levels is still similar at 2 / 255."""
    levels = torch.arange(0, 254, 2).float() / 255
    back = (levels - 0.48145466) / 0.26862954 * 0.26862954 + 0.48145466
    x = back[None, None, :, None].expand(1, 1, -1, P)
    assert int(compute_keep(x, threshold=2 / 255, anchored=False).sum()) == 1
    assert int(compute_keep(x, threshold=1.9 / 255, anchored=False).sum()) == len(levels)


def test_nan_is_similar_to_nothing() -> None:
    x = torch.zeros(1, 3, 3, P)
    x[0, 1, 1, 0] = torch.nan
    assert compute_keep(x)[0, 1, 1] and predict_anchored(x, 0.1, "max").keep[0, 1, 1]


def test_keep_one_keeps_all_and_rejects_threshold() -> None:
    method = tokenprune.method("pixelprune")
    assert method.is_identity(Budget(keep=1.0)) and not method.is_identity(Budget.from_keep(method.default_keep))
    with pytest.raises(OptionError, match=r"keep=1.0 drops no tokens, but threshold=0.02 does"):
        tokenprune.method("pixelprune", threshold=0.02).is_identity(Budget(keep=1.0))
    check_method("pixelprune")


def naive_in_time(pixels: Tensor, threshold: float, metric: str, by_neighbours: bool) -> Tensor:
    keep = torch.ones(pixels.shape[:3], dtype=torch.bool)
    x = pixels.numpy()
    values = x.copy()
    for t, r, c in np.ndindex(*keep.shape):
        if t and DISTANCES[metric](x[t, r, c], (x if by_neighbours else values)[t - 1, r, c]) <= threshold * (1 + 1e-4):
            keep[t, r, c], values[t, r, c] = False, values[t - 1, r, c]
    return keep


@each("metric", METRICS)
@each("threshold", [0.0, 0.005, 0.02, 0.11, 0.5])
@each("by_neighbours", [True, False])
def test_before_compares_with_previous_frame(grid: Tensor, threshold: float, metric: str, by_neighbours: bool) -> None:
    """neighbours="before" is DTD on pixels: the first frame and images keep all units."""
    options = {"neighbours": "before", "threshold": threshold, "metric": metric, "anchored": not by_neighbours}
    kept = compute_keep(grid, **options)
    assert torch.equal(kept, naive_in_time(grid, threshold, metric, by_neighbours)) and kept[0].all()


def test_bound_keeps_largest_changes() -> None:
    """The first frame and the largest changes are kept. A bound below one frame is spread over the first frame."""
    video = draw_noise(5, 4, 6)
    for max_units in (24, 31, 60, 119, 120):
        kept = compute_keep(video, max_units, neighbours="before", metric="mae", anchored=False)
        change = (video[1:] - video[:-1]).abs().mean(-1).flatten()
        best = set(change.argsort(descending=True, stable=True)[: max_units - 24].tolist())
        assert kept[0].all() and set(kept[1:].flatten().nonzero()[:, 0].tolist()) == best
    kept = compute_keep(video, 6, neighbours="before")
    assert int(kept.sum()) == int(kept[0].sum()) == 6 and kept[0].any(1).sum() > 1 and kept[0].any(0).sum() > 1
    assert int(compute_keep(video[:1], 6, neighbours="before").sum()) == 6  # an image
