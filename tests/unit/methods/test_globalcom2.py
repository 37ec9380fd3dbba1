# SPDX-License-Identifier: Apache-2.0
"""globalcom2 against a naive loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from anyres_views import PICTURES, Picture, split, views
from each import each
from tokenprune import OptionError
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, chosen


def resized(picture: Picture, values: list[float]) -> dict[int, float]:
    """The thumbnail's map, resized to the unpadded map of all tiles, for each token."""
    side = picture.side
    size = (picture.down * side - 2 * picture.above, picture.across * side - 2 * picture.beside)
    square = torch.tensor(values[: side * side]).view(1, 1, side, side)
    large = torch.nn.functional.interpolate(square, size, mode="bilinear", align_corners=False).flatten().tolist()
    tiles = [i for i, cell in enumerate(picture.cells) if cell[0] > 0]
    return dict(zip(tiles, large, strict=True))


def unit(values: list[float]) -> list[float]:
    length = max(math.sqrt(sum(one * one for one in values)), 1e-12)
    return [one / length for one in values]


def naive(tokens: VisualTokens, image: int, picture: Picture, temperature: float = 10.0) -> list[int]:
    cells, keep = picture.cells, tokens.keep[image]
    logits = tokens.encoder_logits(-1)[image].double().mean(0)[: len(cells)].tolist()
    of_tile = [[i for i, cell in enumerate(cells) if cell[0] == t] for t in range(picture.tiles + 1)]
    newlines = [i for i, cell in enumerate(cells) if cell[0] < 0]
    all_of = len(cells) - len(newlines)
    budget = min(keep, all_of)
    thumbnail, tiles = of_tile[0], of_tile[1:]
    kept = best(thumbnail, logits, len(thumbnail) * budget // all_of)
    if tiles:
        sums = [0.0] * len(tiles)
        for i in thumbnail:
            sums[picture.block(*cells[i][1:]) - 1] += logits[i]
        power = [math.exp((one - max(sums)) / temperature) for one in sums]
        part = [one / (sum(power) + 1e-8) for one in power]
        scale = [min(1.0, budget / all_of * (1 + one - 1 / len(tiles))) for one in part]
        sizes = list(map(len, tiles))
        numbers = split([a * b for a, b in zip(scale, sizes, strict=True)], sizes, budget - len(kept))
        whole = resized(picture, logits)
        for tile, number in zip(tiles, numbers, strict=True):
            both = zip(unit([logits[i] for i in tile]), unit([whole[i] for i in tile]), strict=True)
            score = dict(zip(tile, (own + other for own, other in both), strict=True))
            kept += best(tile, score, number)
    return sorted(kept + newlines[: keep - len(kept)])


def numbers(picture: Picture, kept: list[int]) -> list[int]:
    """Number of kept tokens of the thumbnail and of each tile."""
    return [sum(picture.cells[i][0] == t for i in kept) for t in range(picture.tiles + 1)]


def at(picture: Picture, value: Any) -> dict[str, Any]:
    """Logits that are a function of the cell."""
    return {"encoder_logits": {-1: torch.tensor([[[float(value(*cell)) for cell in picture.cells]]])}}


@each("options", [{}, {"temperature": 0.5}])
@each("seed", range(6))
def test_equals_naive_loop(seed: int, options: dict[str, Any]) -> None:
    counts = [len(one.cells) for one in PICTURES]
    keep = [max(1, int((0.01, 0.1, 0.34, 0.5, 0.9, 1.0)[seed] * count)) for count in counts]
    tokens = views(PICTURES, keep, seed=seed)
    got = chosen("globalcom2", tokens, **options)
    assert got == [naive(tokens, i, one, **options) for i, one in enumerate(PICTURES)]
    assert list(map(len, got)) == keep
    # A single image keeps the same tokens.
    for i, (one, number) in enumerate(zip(PICTURES, keep, strict=True)):
        own = {"encoder_logits": {-1: tokens.encoder_logits(-1)[i, None, :, : counts[i]]}}
        assert chosen("globalcom2", views([one], [number], **own), **options) == [got[i]]


def test_uniform_thumbnail_gives_tiles_equal_shares() -> None:
    """The first tiles get the remainder, and smaller tiles get fewer tokens."""
    picture = Picture(2, 2, side=4)
    for value in (0.0, 0.7, -3.0):
        (kept,) = chosen("globalcom2", views([picture], [22], **at(picture, lambda *cell: value)))  # noqa: B023
        assert numbers(picture, kept) == [4, 5, 5, 4, 4]
    picture = Picture(3, 1, side=5, above=3)  # 10, 25 and 10 tokens beside the thumbnail's 25
    (kept,) = chosen("globalcom2", views([picture], [35], **at(picture, lambda *cell: 0.0)))
    assert numbers(picture, kept) == [12, 5, 13, 5]


def test_salient_region_doubles_the_share_of_its_tile() -> None:
    """With p near 1, its share is r (2 - 1/n), and r (1 - 1/n) for the other tiles."""
    picture = Picture(2, 2, side=8)
    hot = at(picture, lambda tile, row, column: 100.0 * (tile == 0 and row < 4 and column >= 4))
    (kept,) = chosen("globalcom2", views([picture], [80], **hot))
    assert numbers(picture, kept) == [16, 12, 28, 12, 12]
    (kept,) = chosen("globalcom2", views([picture], [240], **hot))  # scale is 1 at most
    assert numbers(picture, kept) == [48, 43, 64, 43, 42]


def test_constant_offset_of_logits_keeps_the_counts() -> None:
    """Requires regions of equal size."""
    picture = Picture(2, 2, side=8)
    logits = views([picture], [90]).encoder_logits(-1) * 20
    want = numbers(picture, chosen("globalcom2", views([picture], [90], encoder_logits={-1: logits}))[0])
    assert len(set(want[1:])) > 1
    for shift in (1.0, -4.0):
        (kept,) = chosen("globalcom2", views([picture], [90], encoder_logits={-1: logits + shift}))
        assert numbers(picture, kept) == want


def test_thumbnail_ranks_patches_of_a_uniform_tile() -> None:
    """The thumbnail is upsampled by 2. The tile's own logits add in proportion."""
    picture = Picture(2, 2, side=4)
    corner = at(picture, lambda tile, row, column: (tile == 0) * (row + column / 8))
    (kept,) = chosen("globalcom2", views([picture], [24], **corner))
    for tile in range(1, 5):
        rows = sorted(picture.cells[i][1] for i in kept if picture.cells[i][0] == tile)
        assert rows in ([3, 3, 3, 3], [2, 3, 3, 3, 3], [2, 2, 3, 3, 3, 3])
    tokens = views([picture], [24])
    logits = tokens.encoder_logits(-1).clone()
    logits[..., [i for i, cell in enumerate(picture.cells) if cell[0] == 2]] *= 4
    assert chosen("globalcom2", views([picture], [24], encoder_logits={-1: logits})) == chosen("globalcom2", tokens)


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"temperature": "x"}], ids=str)
def test_invalid_option_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"globalcom2.*{next(iter(wrong))}"):
        chosen("globalcom2", views([Picture()], [4]), **wrong)
