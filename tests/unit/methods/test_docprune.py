# SPDX-License-Identifier: Apache-2.0
"""docprune on synthetic pages, against naive loops over patches."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

import tokenprune
from each import each
from families import FAMILIES
from tokenprune import OptionError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.integrations.shared.checks import find_unserved_reason
from tokenprune.methods.encoder.docprune import relevance_map
from tokenprune.testing import check_method
from tower_features import encode

SIDE = 4  # pixels of a patch


def draw_page(height: int = 6, width: int = 5, frames: int = 1, seed: int = 0) -> Tensor:
    """Return the units of a white page with a box, noise as words, a single black pixel, and a nearly white unit.

    Returns:
        Pixels of shape (frames, height, width, values).
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.full((frames, height, width, 4, 3, SIDE * SIDE), 1.0)
    x[:, 1:3, 1] = torch.tensor([0.2, 0.6, 0.4]).view(3, 1)
    x[:, 4] = torch.randint(256, x[:, 4].shape, generator=g) / 255
    x[:, 0, 3, 2, :, 7] = 0.0
    x[:, 3, 2] = 253 / 255
    return x.flatten(3)


def naive(x: Tensor, threshold: float, tolerance: float, max_units: int) -> Tensor:
    """Return the mask of kept units, computed pixel by pixel."""
    frames, height, width, _ = x.shape
    colours = x.view(frames, height * width, 4, 3, -1).mul(255).round().tolist()
    shares = []
    for units in colours:
        grey = [[[round(0.299 * r + 0.587 * g + 0.114 * b) for r, g, b in zip(*patch, strict=True)] for patch in unit]
                for unit in units]  # fmt: skip
        histogram = Counter(value for unit in grey for patch in unit for value in patch)
        background = min(value for value, times in histogram.items() if times == max(histogram.values()))
        shares += [
            min(sum(abs(v - background) < tolerance for v in patch) / len(patch) for patch in unit) for unit in grey
        ]
    foreground = [unit for unit, share in enumerate(shares) if share <= threshold]
    count = min(max_units, max(1, len(foreground)))
    kept = sorted(range(len(shares)), key=lambda unit: shares[unit])[:count]
    keep = torch.zeros(len(shares), dtype=torch.bool)
    keep[kept] = True
    return keep.view(frames, height, width)


@each("tolerance", [1.0, 3.0, 200.0])
@each("threshold", [0.0, 0.5, 0.9, 0.95, 1.0])
def test_kept_units_match_loop(threshold: float, tolerance: float) -> None:
    method = tokenprune.method("docprune", threshold=threshold, tolerance=tolerance)
    for x in (draw_page(), draw_page(frames=3), draw_page(5, 7, seed=1), torch.full((1, 3, 3, 48), 0.5)):
        for max_units in (1, 4, 10**6):
            assert torch.equal(method.keep_units(x, max_units), naive(x, threshold, tolerance, max_units))


def test_background_rules() -> None:
    blank, method = torch.full((1, 4, 4, 192), 0.7), tokenprune.method("docprune")
    assert int(method.keep_units(blank, 16).sum()) == 1
    assert tokenprune.method("docprune", threshold=1.0).keep_units(blank, 16).all()
    kept = method.keep_units(draw_page(), 10**6)[0]
    # The share of the patch with one black pixel of 16 is 0.94.
    assert kept[4].all() and kept[1:3, 1].all() and kept[3, 2] and int(kept.sum()) == 8
    closer = tokenprune.method("docprune", threshold=0.93)
    assert int(closer.keep_units(draw_page(), 10**6).sum()) == 8
    assert int(tokenprune.method("docprune", threshold=0.94).keep_units(draw_page(), 10**6).sum()) == 9
    assert not tokenprune.method("docprune", tolerance=3.0).keep_units(draw_page(), 10**6)[0, 3, 2]
    # A difference equal to the tolerance is foreground.
    assert tokenprune.method("docprune", tolerance=2.0).keep_units(draw_page(), 10**6)[0, 3, 2]


def test_missing_processor_is_rejected(build) -> None:
    with pytest.raises(OptionError, match="Pass processor="):
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), "docprune")


class Colours:
    """Minimal processor."""

    image_mean, image_std = [0.5] * 3, [0.5] * 3


# -- relevance ---------------------------------------------------------------------------------------------------------


def upsample_relevance(relevance: Tensor, height: int, width: int) -> list[list[float]]:
    """Return the relevance of each unit: the maximum of four patches of the upsampled and smoothed map."""
    rows, columns = 2 * height, 2 * width
    values = relevance.double().tolist()

    def find_neighbours(index: int, size: int, count: int) -> tuple[int, int, float]:
        position = max(0.0, (index + 0.5) * count / size - 0.5)
        low = min(int(position), count - 1)
        return low, min(low + 1, count - 1), position - low

    def value(r: int, c: int) -> float:
        top, bottom, down = find_neighbours(r, rows, len(values))
        left, right, along = find_neighbours(c, columns, len(values[0]))
        first = values[top][left] * (1 - along) + values[top][right] * along
        return first * (1 - down) + (values[bottom][left] * (1 - along) + values[bottom][right] * along) * down

    grid = [[value(r, c) for c in range(columns)] for r in range(rows)]
    steps = range(-3, 4)
    weight = {(a, b): math.exp(-(a * a + b * b) / 2) for a in steps for b in steps}
    total = sum(weight.values())

    def smooth(r: int, c: int) -> float:
        return sum(
            w * grid[min(max(r + a, 0), rows - 1)][min(max(c + b, 0), columns - 1)] for (a, b), w in weight.items()
        ) / total  # fmt: skip

    return [
        [max(smooth(2 * r + a, 2 * c + b) for a in (0, 1) for b in (0, 1)) for c in range(width)] for r in range(height)
    ]


def naive_relevant(
    x: Tensor, relevance: Tensor, least_relevance: float | None, threshold: float, max_units: int
) -> Tensor:
    """Return the mask of units that are foreground and relevant."""
    frames, height, width, _ = x.shape
    foreground = naive(x, threshold, 1.0, 10**6).flatten()
    foreground = foreground if foreground.sum() > 1 else torch.zeros_like(foreground)  # a blank page keeps one unit
    score = [value for _ in range(frames) for row in upsample_relevance(relevance, height, width) for value in row]
    relevant = [
        u for u in range(len(score)) if foreground[u] and (least_relevance is None or score[u] >= least_relevance)
    ]
    best = sorted(relevant or range(len(score)), key=lambda u: -score[u])[
        : min(max_units, len(relevant)) if relevant else 1
    ]
    keep = torch.zeros(len(score), dtype=torch.bool)
    keep[best] = True
    return keep.view(frames, height, width)


@each("least_relevance", [None, -0.1, 0.4, 9.0])
@each("threshold", [0.9, 1.0])
def test_relevant_units_match_loop(least_relevance: float | None, threshold: float) -> None:
    g, counts = torch.Generator().manual_seed(1), set()
    for x in (draw_page(), draw_page(frames=2), draw_page(5, 7, seed=1), torch.full((1, 3, 3, 192), 0.5)):
        for size in ((4, 4), (32, 32), (3, 9)):
            relevance = torch.randn(size, generator=g).cumsum(0) / 2
            method = tokenprune.method(
                "docprune", threshold=threshold, relevance=relevance, least_relevance=least_relevance
            )
            for max_units in (1, 4, 10**6):
                got = method.keep_units(x, max_units)
                assert torch.equal(got, naive_relevant(x, relevance, least_relevance, threshold, max_units))
                counts.add(int(got.sum()))
    assert len(counts) > 3 or least_relevance == 9.0


def test_relevance_map_from_retriever_vectors() -> None:
    g = torch.Generator().manual_seed(0)
    documents, questions = torch.randn(12, 5, generator=g), torch.randn(4, 5, generator=g)
    documents[3] = 0
    want = [
        sum(float(d @ q / (d.norm() * q.norm())) if d.any() else 0.0 for q in questions) for d in documents
    ]  # fmt: skip
    got = relevance_map(documents, questions, 3)
    torch.testing.assert_close(got, torch.tensor(want).view(3, 4))
    torch.testing.assert_close(relevance_map(documents, questions.flip(0), 3), got)
    torch.testing.assert_close(relevance_map(documents, torch.cat([questions, torch.zeros(2, 5)]), 3), got)
    assert relevance_map(documents[:9], questions).shape == (3, 3) and got[0, 3] == 0


@torch.no_grad()
def test_function_returns_map_per_image(build) -> None:
    model, inputs = build(FAMILIES["qwen2_vl"]), FAMILIES["qwen2_vl"].make_inputs(images=(2, 1))
    grids, g = inputs["image_grid_thw"], torch.Generator().manual_seed(0)
    maps = [torch.randn(4, 4, generator=g) for _ in grids]
    remaining, shapes = iter(maps), []

    def relevance(pixels: Tensor) -> Tensor:
        shapes.append(pixels.shape[:3])
        return next(remaining)

    def list_kept(**options: object) -> list[Tensor]:
        with tokenprune.patched(model, "docprune", processor=Colours(), threshold=1.0, keep=0.4, **options):
            return list(get_record(encode(model, inputs)["image"]).kept)

    got = list_kept(relevance=relevance)
    assert [tuple(shape) for shape in shapes] == [(t, h // 2, w // 2) for t, h, w in grids.tolist()]
    assert [int(mask.sum()) for mask in got] == [max(1, round(0.4 * len(mask))) for mask in got]
    for index, image_map in enumerate(maps):
        assert torch.equal(list_kept(relevance=image_map)[index], got[index])


def test_invalid_map_is_rejected_and_not_served(build) -> None:
    check_method(tokenprune.method("docprune", relevance=torch.rand(8, 8), least_relevance=0.4))
    assert tokenprune.method("docprune", relevance=torch.rand(8, 8)).query_aware
    reason = find_unserved_reason(tokenprune.method("docprune", relevance=torch.rand(8, 8)))
    assert "it reads the question" in reason and "Use docprune with relevance=null, least_relevance=null" in reason
    with pytest.raises(OptionError, match="must return a tensor"):
        tokenprune.method("docprune", relevance=lambda pixels: 1.0).keep_units(draw_page(), 4)
    with pytest.raises(OptionError, match=r"feature_cache= .* depend on the question"):
        options = {"processor": Colours(), "relevance": torch.rand(8, 8), "feature_cache": 10**6}
        tokenprune.patch(build(FAMILIES["qwen2_vl"]), "docprune", **options)
