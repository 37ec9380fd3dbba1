# SPDX-License-Identifier: Apache-2.0
"""dart, pool, random and uniform against naive loops, on synthetic tokens, and properties of all methods."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import METHODS
from each import each
from several_cuts import WIDTH, view
from tokenprune import Selection, Site, VisualTokens


def select(name: str, tokens: VisualTokens, **options: Any) -> list[list[int]]:
    keep = tokenprune.method(name, **options).select(tokens).keep
    assert keep.dtype == torch.bool and not (keep & ~tokens.mask).any()
    return [row.nonzero().flatten().tolist() for row in keep]


def unit(x: Tensor) -> Tensor:
    return x.float() / x.float().norm(dim=-1, keepdim=True)


def naive_dart(
    states: Tensor, keys: Tensor, text: Tensor, text_keys: Tensor, keep: int, images=4, texts=4
) -> list[int]:
    """Return the kept tokens. Image pivots come first, then text pivots, both by decreasing norm of their keys.

    Args:
        states: Hidden states of image tokens after the final norm.
        text: Hidden states of text tokens after the final norm.
    """

    def largest(rows: Tensor, count: int) -> list[int]:
        norms = [float(row.abs().sum()) for row in rows.float()]
        return sorted(range(len(norms)), key=lambda i: (-norms[i], i))[:count]

    kept = largest(keys, min(images, keep))
    pivots = [states[i] for i in kept] + [text[i] for i in largest(text_keys, texts)]
    remaining = keep - len(kept)
    for index, pivot in enumerate(pivots):
        share = remaining // len(pivots) + (index < remaining % len(pivots))
        pool = [i for i in range(len(states)) if i not in kept]
        similarity = {i: float(unit(states[i]) @ unit(pivot)) for i in pool}
        kept += sorted(pool, key=lambda i: (similarity[i], i))[:share]
    return sorted(kept)


@each("seed", range(3))
@each(("images", "texts"), [(4, 4), (1, 0), (2, 9), (6, 3)])
@each("keep", [1, 3, 8, 13, 19])
def test_dart(seed: int, images: int, texts: int, keep: int) -> None:
    tokens = view([20, 20], [keep, 20], ("keys",), seed=seed)
    text, text_keys = tokens.final_norm(tokens.text.hidden), tokens.text.keys
    want = naive_dart(tokens.normed[0], tokens.keys[0], text[0], text_keys[0], keep, images, texts)
    options = dict(pivot_image=images, pivot_text=texts)
    assert select("dart", tokens, **options)[0] == want
    # The authors' count: equal shares for all pivots, plus the image pivots.
    pivots = images + texts
    method = tokenprune.method("dart", **options, exact=False)
    assert method.resolve_count(500, 131) == images + pivots * (131 // pivots)


def test_dart_takes_duplicates_of_a_pivot_last() -> None:
    hidden, keys = torch.randn(1, 12, WIDTH), torch.ones(1, 12, WIDTH)
    keys[0, 2] = 9
    hidden[0, [5, 7]] = hidden[0, 2].clone()
    for keep in range(1, 11):
        tokens = view([12], [keep], ("keys",), hidden=hidden, keys=keys)
        (got,) = select("dart", tokens, pivot_image=1, pivot_text=0)
        assert 2 in got and not {5, 7} & set(got)


@each("grid", [(1, 4, 4), (1, 3, 7), (1, 7, 3), (1, 1, 9), (1, 6, 5), (3, 4, 2), None])
def test_pool_averages_rectangles(grid: tuple[int, int, int] | None) -> None:
    frames, height, width = grid or (1, 1, 10)
    count = frames * height * width
    for keep in range(1, count + 1):
        tokens = view([count], [keep], (), grids=[grid])
        selection = tokenprune.method("pool").select(tokens)
        kept, assign = selection.keep[0].nonzero().flatten().tolist(), selection.assign[0].tolist()
        assert len(kept) == keep
        # A partition, in which kept tokens represent themselves.
        assert set(assign) == set(kept) and all(assign[i] == i for i in kept)
        heights: list[int] = []
        for target in kept:
            members = [i for i in range(count) if assign[i] == target]
            rows, columns = {i // width for i in members}, {i % width for i in members}
            assert len(members) == len(rows) * len(columns)  # a full rectangle
            assert max(rows) - min(rows) < len(rows) and max(columns) - min(columns) < len(columns)
            heights.append(len(rows))
            # The kept token is in the middle.
            assert abs(target // width - sum(rows) / len(rows)) <= 0.5
            assert abs(target % width - sum(columns) / len(columns)) <= 0.5
        assert max(heights) - min(heights) <= 1


def test_random_depends_on_the_seed_but_not_on_the_batch() -> None:
    batch = select("random", view([30, 20], [9, 7], ()), seed=3)
    assert batch == select("random", view([30, 20], [9, 7], (), seed=1), seed=3)
    assert batch != select("random", view([30, 20], [9, 7], ()), seed=4)
    assert [batch[1]] == select("random", view([20], [7], ()), seed=3)  # independent of the batch
    counts = torch.zeros(30)
    for seed in range(300):
        counts[select("random", view([30], [10], ()), seed=seed)[0]] += 1
    assert counts.min() > 60 and counts.max() < 140


@pytest.mark.parametrize("count", [1, 7, 16, 36])
def test_uniform_in_raster_order(count: int) -> None:
    for keep in range(1, count + 1):
        (got,) = select("uniform", view([count], [keep], ()))
        assert len(got) == keep
        gaps = [b - a for a, b in pairwise(got)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        assert abs(got[0] - (count - 1 - got[-1])) <= 1  # as far from the start as from the end


def naive_uniform(keep: int, grid: tuple[int, int, int]) -> list[int]:
    """Spread points over frames, then over the rows of a frame, then over the columns of a row."""
    frames, height, width = grid
    kept = []
    for frame in range(frames):
        frame_count = sum(math.floor((j + 0.5) * frames / keep) == frame for j in range(keep))
        if not frame_count:
            continue
        rows = next(r for r in range(1, height + 1) if frame_count <= r * width)  # the fewest rows that fit
        # One more row, if it makes the cells closer to squares.
        while rows < min(height, frame_count) and (rows + 0.5) ** 2 < frame_count * height / width:
            rows += 1
        for i in range(rows):
            row = math.floor((i + 0.5) * height / rows)
            row_count = sum(math.floor((j + 0.5) * rows / frame_count) == i for j in range(frame_count))
            columns = [math.floor((j + 0.5) * width / row_count) for j in range(row_count)]
            kept += [frame * height * width + row * width + column for column in columns]
    return kept


@each("grid", [(1, 4, 4), (1, 6, 5), (1, 3, 11), (1, 11, 3), (1, 1, 7), (1, 7, 1), (5, 3, 4)])
def test_uniform_over_a_grid(grid: tuple[int, int, int]) -> None:
    frames, height, width = grid
    count = frames * height * width
    for keep in range(1, count + 1):
        tokens = view([count, 9], [keep, 2], (), grids=[grid, None])  # with an image of unknown grid
        got, other = select("uniform", tokens)
        assert got == naive_uniform(keep, grid) and len(got) == keep
        assert other == select("uniform", view([9], [2], ()))[0]
        per_frame = [sum(i // (height * width) == frame for i in got) for frame in range(frames)]
        assert max(per_frame) - min(per_frame) <= 1


def test_uniform_keeps_rows_and_columns_evenly() -> None:
    """A quarter of 16 x 16 tokens is every second row and column, not four columns of every row."""
    (got,) = select("uniform", view([256], [64], (), grids=[(1, 16, 16)]))
    assert got == [16 * row + column for row in range(1, 16, 2) for column in range(1, 16, 2)]
    (single,) = select("uniform", view([256], [1], (), grids=[(1, 16, 16)]))
    assert single == [8 * 16 + 8]


def test_top_breaks_ties_by_index_and_ranks_nan_last() -> None:
    inf, nan = torch.inf, torch.nan
    score = torch.tensor([[1.0, 3.0, 3.0, 2.0, nan], [-inf, nan, -inf, 9.0, 9.0]])
    for keep, want in (([1, 1], [[1], [0]]), ([2, 2], [[1, 2], [0, 1]]), ([4, 3], [[0, 1, 2, 3], [0, 1, 2]])):
        got = Selection.top(score, view([5, 3], keep, ())).keep
        assert [row.nonzero().flatten().tolist() for row in got] == want


def test_methods_are_frozen_and_documented() -> None:
    for name in METHODS:
        info = tokenprune.method_info(name)
        assert info.summary.endswith((".", "!")) and len(info.summary) < 300
        assert info.paper and info.site in Site
        assert info.observables <= set(tokenprune.selection.available_observables())
        method = tokenprune.method(name)
        assert method.name == name and method == tokenprune.method(name, **info.options)
        assert not (method.query_aware and method.prefix_cache_safe)
        for option in info.options:
            with pytest.raises(FrozenInstanceError):
                setattr(method, option, 1)
