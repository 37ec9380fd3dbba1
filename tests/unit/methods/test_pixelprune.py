# SPDX-License-Identifier: Apache-2.0
"""`pixelprune` on drawn grids of units, against a loop over units that is written from its description."""

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
    """Return the kept units and the replacement of each unit, in a loop over units."""
    frames, height, width, _ = pixels.shape
    keep = torch.ones(frames, height, width, dtype=torch.bool)
    x = pixels.numpy()
    stands = x.copy()
    seen = x if by_neighbours else stands

    def similar(a: np.ndarray, b: np.ndarray) -> bool:
        return bool(DISTANCES[metric](a, b) <= threshold * (1 + 1e-4))

    for t in range(frames):
        for r in range(height):
            for c in range(width):
                left = seen[t, r, c - 1] if c else None
                above = seen[t, r - 1, c] if r else None
                if left is not None and above is not None:
                    corner = seen[t, r - 1, c - 1]
                    predicted = above if similar(corner, left) and not similar(corner, above) else left
                else:
                    predicted = left if above is None else above
                before = seen[t - 1, r, c] if t else None
                for one in (before, predicted):
                    if one is not None and similar(x[t, r, c], one):
                        keep[t, r, c] = False
                        stands[t, r, c] = one
                        break
    return keep, torch.from_numpy(stands)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, P, generator=torch.Generator().manual_seed(seed))


def steps(*shape: int, levels: int = 4, seed: int = 0) -> Tensor:
    """Colours of a few levels, one for a whole unit, so that many units are equal and many nearly so."""
    g = torch.Generator().manual_seed(seed)
    plain = torch.randint(levels, (*shape, 1), generator=g) / 10
    return (plain + 0.01 * torch.randint(2, (*shape, P), generator=g)).float()


def page(height: int = 12, width: int = 10, frames: int = 1) -> Tensor:
    """A page: plain ground, two boxes, and lines of 'words' that have some detail."""
    x = torch.ones(frames, height, width, P)
    x[:, 1:4, 1:5] = 0.3
    x[:, 2:9, 7:9] = 0.6
    x[:, 6, 1:6] = noise(5)
    x[:, 9, 1:9] = noise(8, seed=1)
    return x


GRIDS = {
    "page": page(),
    "page of two frames": torch.cat([page(), page().roll(1, 2)]),
    "steps": steps(1, 8, 6),
    "steps in frames": steps(3, 4, 5, levels=2),
    "noise": noise(1, 4, 5),
    "row": steps(1, 1, 12, levels=2),
    "column": steps(1, 12, 1, levels=2),
    "one": noise(1, 1, 1),
    "frames of one": steps(5, 1, 1, levels=1),
}


@pytest.fixture(params=GRIDS)
def grid(request: pytest.FixtureRequest) -> Tensor:
    return GRIDS[request.param]


@each("metric", METRICS)
@each("threshold", [0.0, 0.005, 0.02, 0.11, 0.5])
def test_both_forms_match_loop(grid: Tensor, threshold: float, metric: str) -> None:
    found = predict_anchored(grid, threshold, metric)
    want, stands = naive(grid, threshold, metric)
    assert torch.equal(found.keep, want)
    assert torch.equal(grid.flatten(0, 2)[found.source.flatten()].view_as(grid), stands)
    fast = predict_from_neighbours(Distances.from_pixels(grid, metric), threshold)
    assert torch.equal(fast.keep, naive(grid, threshold, metric, by_neighbours=True)[0])
    if threshold == 0:
        assert torch.equal(fast.keep, found.keep)
        assert torch.equal(fast.error, found.error)


def test_unanchored_drops_slow_gradient() -> None:
    ramp = (torch.arange(40) / 100)[None, None, :, None].expand(1, 1, 40, P)
    assert int(tokenprune.method("pixelprune", threshold=0.02, anchored=False).keep_units(ramp, EVERYTHING).sum()) == 1
    assert int(tokenprune.method("pixelprune", threshold=0.02).keep_units(ramp, EVERYTHING).sum()) == 14


def keep_of(pixels: Tensor, most: int = EVERYTHING, **options: object) -> Tensor:
    return tokenprune.method("pixelprune", **options).keep_units(pixels, most)


def test_uniform_image_keeps_one_unit() -> None:
    keep = keep_of(torch.full((1, 9, 7, P), 0.4))
    assert keep.nonzero().tolist() == [[0, 0, 0]]
    assert keep_of(torch.full((4, 9, 7, P), 0.4)).nonzero().tolist() == [[0, 0, 0]]  # of a still video, too


@pytest.mark.parametrize("size", [2, 5, 11])
def test_rectangle_keeps_corners(size: int) -> None:
    """Edges are predicted, whichever way they run: however large the rectangle, as many units stay."""
    x = torch.zeros(1, size + 4, size + 4, P)
    x[:, 2 : 2 + size, 2 : 2 + size] = 1
    end = 2 + size
    assert keep_of(x).nonzero()[:, 1:].tolist() == [[0, 0], [2, 2], [2, end], [end, 2]]


def test_noise_keeps_all() -> None:
    assert keep_of(noise(1, 8, 9)).all() and keep_of(noise(3, 4, 5)).all()


def test_static_content_is_kept_once() -> None:
    frame = noise(1, 6, 5)
    moved = frame.clone()
    moved[0, 2, 3] += 0.5
    keep = keep_of(torch.cat([frame, frame, moved, frame]))
    assert [int(one.sum()) for one in keep] == [30, 0, 1, 1]


def test_larger_threshold_keeps_fewer() -> None:
    for pixels in (page(), steps(1, 9, 7), noise(1, 6, 5), steps(3, 5, 6)):
        counts = [int(keep_of(pixels, threshold=tau).sum()) for tau in (0.0, 0.011, 0.1, 0.2, 0.35, 0.6, 1.0)]
        assert counts == sorted(counts, reverse=True) and counts[-1] == 1
        assert len(set(counts)) >= 3


@each(("name", "metric"), [*((name, "max") for name in GRIDS), ("page", "mae"), ("steps", "rmse")])
def test_bound_is_exact_if_exceeded(name: str, metric: str) -> None:
    grid = GRIDS[name]
    exact = keep_of(grid, metric=metric)
    for most in {1, 2, grid[..., 0].numel() // 2 or 1, int(exact.sum()), EVERYTHING}:
        keep = keep_of(grid, most, metric=metric)
        assert int(keep.sum()) == min(most, int(exact.sum()))
        assert bool(keep[0, 0, 0])
        assert not bool((keep & ~exact).any()) or most < int(exact.sum())
    assert torch.equal(keep_of(grid, int(exact.sum()), metric=metric), exact)


def test_bound_drops_smallest_errors_first() -> None:
    """A faint texture goes before strokes of text; and where no threshold leaves the number, the smallest errors go."""
    x = torch.full((1, 6, 8, P), 0.9)
    x[0, 1:3] += 0.02 * noise(2, 8)
    x[0, 4] = noise(8, seed=3)
    keep = keep_of(x, 10)
    assert keep[0, 4].all() and int(keep.sum()) == 10
    equal_steps = torch.zeros(1, 1, 9, P)
    equal_steps[0, 0, ::2] = 0.5
    assert keep_of(equal_steps, 4)[0, 0].tolist() == [True] * 4 + [False] * 5  # ties: the first stay


def test_bound_spreads_over_gradient() -> None:
    ramp = (torch.arange(40) / 100)[None, None, :, None].expand(1, 1, 40, P)
    places = keep_of(ramp, 14)[0, 0].nonzero()[:, 0]
    assert len(places) == 14 and int(torch.cat([places, torch.tensor([40])]).diff().max()) <= 4


def test_threshold_with_bound() -> None:
    x = steps(1, 9, 7)
    alone = keep_of(x, threshold=0.02)
    assert torch.equal(keep_of(x, 60, threshold=0.02), alone)
    assert int(keep_of(x, 10, threshold=0.02).sum()) == 10 < int(alone.sum())


def test_normalised_colors_meet_threshold() -> None:
    """(x - mean) / std and back rounds; a step of exactly two levels of 255 is similar at 2 / 255."""
    levels = torch.arange(0, 254, 2).float() / 255
    back = (levels - 0.48145466) / 0.26862954 * 0.26862954 + 0.48145466
    x = back[None, None, :, None].expand(1, 1, -1, P)
    assert int(keep_of(x, threshold=2 / 255, anchored=False).sum()) == 1
    assert int(keep_of(x, threshold=1.9 / 255, anchored=False).sum()) == len(levels)


def test_nan_is_similar_to_nothing() -> None:
    x = torch.zeros(1, 3, 3, P)
    x[0, 1, 1, 0] = torch.nan
    assert keep_of(x)[0, 1, 1] and predict_anchored(x, 0.1, "max").keep[0, 1, 1]


def test_keep_one_keeps_all_and_rejects_threshold() -> None:
    method = tokenprune.method("pixelprune")
    assert method.is_identity(Budget(keep=1.0)) and not method.is_identity(Budget.from_keep(method.default_keep))
    with pytest.raises(OptionError, match=r"keep=1.0 drops no tokens, but threshold=0.02 does"):
        tokenprune.method("pixelprune", threshold=0.02).is_identity(Budget(keep=1.0))
    check_method("pixelprune")


def naive_in_time(pixels: Tensor, threshold: float, metric: str, by_neighbours: bool) -> Tensor:
    keep = torch.ones(pixels.shape[:3], dtype=torch.bool)
    x = pixels.numpy()
    stands = x.copy()
    for t, r, c in np.ndindex(*keep.shape):
        if t and DISTANCES[metric](x[t, r, c], (x if by_neighbours else stands)[t - 1, r, c]) <= threshold * (1 + 1e-4):
            keep[t, r, c], stands[t, r, c] = False, stands[t - 1, r, c]
    return keep


@each("metric", METRICS)
@each("threshold", [0.0, 0.005, 0.02, 0.11, 0.5])
@each("by", [True, False])
def test_before_compares_with_previous_frame(grid: Tensor, threshold: float, metric: str, by: bool) -> None:
    """The form of DTD on pixels: the first frame stays whole, and an image."""
    options = {"neighbours": "before", "threshold": threshold, "metric": metric, "anchored": not by}
    kept = keep_of(grid, **options)
    assert torch.equal(kept, naive_in_time(grid, threshold, metric, by)) and kept[0].all()


def test_bound_keeps_largest_changes() -> None:
    """As many as the bound, the first frame and the largest changes; less than a frame is spread over it."""
    video = noise(5, 4, 6)
    for most in (24, 31, 60, 119, 120):
        kept = keep_of(video, most, neighbours="before", metric="mae", anchored=False)
        change = (video[1:] - video[:-1]).abs().mean(-1).flatten()
        best = set(change.argsort(descending=True, stable=True)[: most - 24].tolist())
        assert kept[0].all() and set(kept[1:].flatten().nonzero()[:, 0].tolist()) == best
    kept = keep_of(video, 6, neighbours="before")
    assert int(kept.sum()) == int(kept[0].sum()) == 6 and kept[0].any(1).sum() > 1 and kept[0].any(0).sum() > 1
    assert int(keep_of(video[:1], 6, neighbours="before").sum()) == 6  # an image
