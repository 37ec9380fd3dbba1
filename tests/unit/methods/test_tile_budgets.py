# SPDX-License-Identifier: Apache-2.0
"""hired and globalcom2, which share the budget of an image among its tiles, against naive loops."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch

from anyres_views import PICTURES, Picture, split, views
from each import each
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, chosen

# -- hired -------------------------------------------------------------------------------------------------------------


def naive_hired(
    tokens: VisualTokens, image: int, picture: Picture, alpha: float = 0.5, mode: str = "blocks"
) -> list[int]:
    early = tokens.encoder_attention(0)[image].sum(0).tolist()
    late = tokens.encoder_attention(-1)[image].sum(0).tolist()
    cells, keep = picture.cells, tokens.keep[image]
    of_tile = [[i for i, cell in enumerate(cells) if cell[0] == t] for t in range(picture.tiles + 1)]
    newlines = [i for i, cell in enumerate(cells) if cell[0] < 0]
    budget = min(keep, len(cells) - len(newlines))
    thumbnail, tiles = of_tile[0], of_tile[1:]
    first = min(int(budget * alpha), len(thumbnail)) if tiles else budget
    rest = min(budget - first, sum(map(len, tiles)))
    numbers: list[int] = []
    if tiles:
        marked = best(thumbnail, early, int(len(thumbnail) * (1 - alpha)))
        marks = [0] * len(tiles)
        for i in marked:
            row, column = cells[i][1:]
            band = (row * picture.side + column) * len(tiles) // len(thumbnail)
            marks[band if mode == "bands" else picture.block(row, column) - 1] += 1
        numbers = split([Fraction(one) for one in marks], list(map(len, tiles)), rest)
    kept = best(thumbnail, late, budget - rest)
    for tile, number in zip(tiles, numbers, strict=True):
        kept += best(tile, late, number)
    return sorted(kept + newlines[: keep - len(kept)])


@each("options", [{}, {"mode": "bands"}, {"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 0.3}])
@each("ties", [False, True])
def test_hired_equals_naive_loop(ties: bool, options: dict[str, Any]) -> None:
    counts = [len(one.cells) for one in PICTURES]
    for seed, share in enumerate((0.01, 0.1, 0.34, 0.5, 0.9, 1.0)):
        keep = [max(1, int(share * count)) for count in counts]
        tokens = views(PICTURES, keep, seed=seed, ties=ties)
        got = chosen("hired", tokens, **options)
        assert got == [naive_hired(tokens, i, one, **options) for i, one in enumerate(PICTURES)]
        assert list(map(len, got)) == keep
        assert got == [chosen("hired", views([one], [k], **alone(tokens, i)), **options)[0]
                       for i, (one, k) in enumerate(zip(PICTURES, keep, strict=True))]  # fmt: skip


def alone(tokens: VisualTokens, image: int) -> dict[str, Any]:
    """Return the tower's attention of one image of a batch."""
    count = tokens.counts[image]
    return {"encoder_attention": {at: tokens.encoder_attention(at)[image, None, :, :count] for at in (0, -1)}}


def numbers(picture: Picture, kept: list[int]) -> list[int]:
    """Number of kept tokens of the thumbnail and of each tile."""
    return [sum(picture.cells[i][0] == t for i in kept) for t in range(picture.tiles + 1)]


def scores_of(picture: Picture, value: Any) -> torch.Tensor:
    """Return scores that are a function of the cell, shape (1, 1, tokens)."""
    return torch.tensor([[[float(value(*cell)) for cell in picture.cells]]])


def test_hired_constant_attention_marks_the_first_half() -> None:
    """The upper two of 2 x 2 tiles get the whole budget, because ties go to the lower index."""
    picture = Picture(2, 2, side=8)
    flat = scores_of(picture, lambda tile, row, column: tile == 0)
    (kept,) = chosen("hired", views([picture], [64], encoder_attention={0: flat, -1: flat}))
    assert numbers(picture, kept) == [32, 16, 16, 0, 0]


def test_hired_salient_tile_gets_the_largest_budget() -> None:
    """32 of 64 cells are marked. All 16 cells of a salient quadrant are among these, so its tile gets at least half."""
    picture = Picture(2, 2, side=8)
    hot = scores_of(
        picture, lambda tile, row, column: (tile == 0) * (2 * (row >= 4 and column >= 4) + (row < 4) * row / 9)
    )
    given = {"encoder_attention": {0: hot, -1: hot}}
    (kept,) = chosen("hired", views([picture], [60], **given))
    assert numbers(picture, kept) == [30, 8, 7, 0, 15]  # marks are 8, 8, 0, 16
    (kept,) = chosen("hired", views([picture], [60], **given), mode="bands")
    assert numbers(picture, kept) == [30, 0, 15, 8, 7]  # two rows of the thumbnail each: 0, 16, 8, 8


def test_hired_budget_beyond_a_full_tile_goes_to_others() -> None:
    """Tiles with much padding keep all their tokens, and the thumbnail gets the remainder."""
    picture = Picture(2, 1, above=3)  # of each tile one row of four
    (kept,) = chosen("hired", views([picture], [20]))
    assert numbers(picture, kept) == [12, 4, 4]
    (kept,) = chosen("hired", views([picture], [25]))  # one of the two newlines goes
    assert numbers(picture, kept) == [16, 4, 4] and len(kept) == 25


# -- globalcom2 --------------------------------------------------------------------------------------------------------


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


def naive_globalcom2(tokens: VisualTokens, image: int, picture: Picture, temperature: float = 10.0) -> list[int]:
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


@each("options", [{}, {"temperature": 0.5}])
@each("shift", [0.0, -4.0])  # the softmax over tiles must not underflow
@each("seed", range(6))
def test_globalcom2_equals_naive_loop(seed: int, shift: float, options: dict[str, Any]) -> None:
    counts = [len(one.cells) for one in PICTURES]
    keep = [max(1, int((0.01, 0.1, 0.34, 0.5, 0.9, 1.0)[seed] * count)) for count in counts]
    logits = views(PICTURES, keep, seed=seed).encoder_logits(-1) + shift
    tokens = views(PICTURES, keep, seed=seed, encoder_logits={-1: logits})
    got = chosen("globalcom2", tokens, **options)
    assert got == [naive_globalcom2(tokens, i, one, **options) for i, one in enumerate(PICTURES)]
    assert list(map(len, got)) == keep
    # A single image keeps the same tokens.
    for i, (one, number) in enumerate(zip(PICTURES, keep, strict=True)):
        own = {"encoder_logits": {-1: tokens.encoder_logits(-1)[i, None, :, : counts[i]]}}
        assert chosen("globalcom2", views([one], [number], **own), **options) == [got[i]]


def test_globalcom2_uniform_thumbnail_gives_tiles_equal_shares() -> None:
    """The first tiles get the remainder, and smaller tiles get fewer tokens."""
    picture = Picture(2, 2, side=4)
    for value in (0.0, 0.7, -3.0):
        flat = scores_of(picture, lambda *cell, value=value: value)
        (kept,) = chosen("globalcom2", views([picture], [22], encoder_logits={-1: flat}))
        assert numbers(picture, kept) == [4, 5, 5, 4, 4]
    picture = Picture(3, 1, side=5, above=3)  # 10, 25 and 10 tokens beside the thumbnail's 25
    (kept,) = chosen("globalcom2", views([picture], [35], encoder_logits={-1: scores_of(picture, lambda *cell: 0.0)}))
    assert numbers(picture, kept) == [12, 5, 13, 5]


def test_globalcom2_salient_region_doubles_the_share_of_its_tile() -> None:
    """With p near 1, its share is r (2 - 1/n), and r (1 - 1/n) for the other tiles."""
    picture = Picture(2, 2, side=8)
    scores = scores_of(picture, lambda tile, row, column: 100.0 * (tile == 0 and row < 4 and column >= 4))
    hot = {"encoder_logits": {-1: scores}}
    (kept,) = chosen("globalcom2", views([picture], [80], **hot))
    assert numbers(picture, kept) == [16, 12, 28, 12, 12]
    (kept,) = chosen("globalcom2", views([picture], [240], **hot))  # scale is 1 at most
    assert numbers(picture, kept) == [48, 43, 64, 43, 42]
