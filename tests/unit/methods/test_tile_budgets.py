# SPDX-License-Identifier: Apache-2.0
"""hired and globalcom2, methods that share the budget of an image among its tiles, against naive loops."""

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
    tile_tokens = [[i for i, cell in enumerate(cells) if cell[0] == t] for t in range(picture.tiles + 1)]
    newlines = [i for i, cell in enumerate(cells) if cell[0] < 0]
    budget = min(keep, len(cells) - len(newlines))
    thumbnail, tiles = tile_tokens[0], tile_tokens[1:]
    thumbnail_budget = min(int(budget * alpha), len(thumbnail)) if tiles else budget
    rest = min(budget - thumbnail_budget, sum(map(len, tiles)))
    quotas: list[int] = []
    if tiles:
        marked = best(thumbnail, early, int(len(thumbnail) * (1 - alpha)))
        marks = [0] * len(tiles)
        for i in marked:
            row, column = cells[i][1:]
            band = (row * picture.side + column) * len(tiles) // len(thumbnail)
            marks[band if mode == "bands" else picture.block(row, column) - 1] += 1
        quotas = split([Fraction(count) for count in marks], list(map(len, tiles)), rest)
    kept = best(thumbnail, late, budget - rest)
    for tile, quota in zip(tiles, quotas, strict=True):
        kept += best(tile, late, quota)
    return sorted(kept + newlines[: keep - len(kept)])


@each("options", [{}, {"mode": "bands"}, {"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 0.3}])
@each("ties", [False, True])
def test_hired_equals_naive_loop(ties: bool, options: dict[str, Any]) -> None:
    counts = [len(picture.cells) for picture in PICTURES]
    for seed, share in enumerate((0.01, 0.1, 0.34, 0.5, 0.9, 1.0)):
        keep = [max(1, int(share * count)) for count in counts]
        tokens = views(PICTURES, keep, seed=seed, ties=ties)
        got = chosen("hired", tokens, **options)
        assert got == [naive_hired(tokens, i, picture, **options) for i, picture in enumerate(PICTURES)]
        assert list(map(len, got)) == keep
        assert got == [chosen("hired", views([picture], [k], **select_image(tokens, i)), **options)[0]
                       for i, (picture, k) in enumerate(zip(PICTURES, keep, strict=True))]  # fmt: skip


def select_image(tokens: VisualTokens, image: int) -> dict[str, Any]:
    """Return the tower attention for one image of a batch."""
    count = tokens.counts[image]
    return {"encoder_attention": {layer: tokens.encoder_attention(layer)[image, None, :, :count] for layer in (0, -1)}}


def count_per_tile(picture: Picture, kept: list[int]) -> list[int]:
    """Return the number of kept tokens of the thumbnail and of each tile."""
    return [sum(picture.cells[i][0] == t for i in kept) for t in range(picture.tiles + 1)]


def compute_scores(picture: Picture, value: Any) -> torch.Tensor:
    """Return scores that are a function of the cell, shape (1, 1, tokens)."""
    return torch.tensor([[[float(value(*cell)) for cell in picture.cells]]])


def test_hired_constant_attention_marks_the_first_half() -> None:
    """The upper two of 2 x 2 tiles get the whole budget, because ties go to the lower index."""
    picture = Picture(2, 2, side=8)
    flat = compute_scores(picture, lambda tile, row, column: tile == 0)
    (kept,) = chosen("hired", views([picture], [64], encoder_attention={0: flat, -1: flat}))
    assert count_per_tile(picture, kept) == [32, 16, 16, 0, 0]


def test_hired_salient_tile_gets_the_largest_budget() -> None:
    """32 of 64 cells are marked, with all 16 cells of the salient quadrant, so its tile gets at least half."""
    picture = Picture(2, 2, side=8)
    salient = compute_scores(
        picture, lambda tile, row, column: (tile == 0) * (2 * (row >= 4 and column >= 4) + (row < 4) * row / 9)
    )
    attention = {"encoder_attention": {0: salient, -1: salient}}
    (kept,) = chosen("hired", views([picture], [60], **attention))
    assert count_per_tile(picture, kept) == [30, 8, 7, 0, 15]  # marks are 8, 8, 0, 16
    (kept,) = chosen("hired", views([picture], [60], **attention), mode="bands")
    # A band is two rows of the thumbnail, so marks are 0, 16, 8, 8.
    assert count_per_tile(picture, kept) == [30, 0, 15, 8, 7]


def test_hired_budget_beyond_a_full_tile_goes_to_others() -> None:
    """Tiles with much padding keep all their tokens, and the thumbnail gets the remainder."""
    picture = Picture(2, 1, above=3)  # one row of four patches remains per tile
    (kept,) = chosen("hired", views([picture], [20]))
    assert count_per_tile(picture, kept) == [12, 4, 4]
    (kept,) = chosen("hired", views([picture], [25]))  # one of the two newlines is dropped
    assert count_per_tile(picture, kept) == [16, 4, 4] and len(kept) == 25


# -- globalcom2 --------------------------------------------------------------------------------------------------------


def resize_map(picture: Picture, values: list[float]) -> dict[int, float]:
    """Return the thumbnail's values for each token of the tiles, resized to the unpadded map of all tiles."""
    side = picture.side
    size = (picture.down * side - 2 * picture.above, picture.across * side - 2 * picture.beside)
    square = torch.tensor(values[: side * side]).view(1, 1, side, side)
    large = torch.nn.functional.interpolate(square, size, mode="bilinear", align_corners=False).flatten().tolist()
    tiles = [i for i, cell in enumerate(picture.cells) if cell[0] > 0]
    return dict(zip(tiles, large, strict=True))


def unit(values: list[float]) -> list[float]:
    length = max(math.sqrt(sum(value * value for value in values)), 1e-12)
    return [value / length for value in values]


def naive_globalcom2(tokens: VisualTokens, image: int, picture: Picture, temperature: float = 10.0) -> list[int]:
    cells, keep = picture.cells, tokens.keep[image]
    logits = tokens.encoder_logits(-1)[image].double().mean(0)[: len(cells)].tolist()
    tile_tokens = [[i for i, cell in enumerate(cells) if cell[0] == t] for t in range(picture.tiles + 1)]
    newlines = [i for i, cell in enumerate(cells) if cell[0] < 0]
    num_patches = len(cells) - len(newlines)
    budget = min(keep, num_patches)
    thumbnail, tiles = tile_tokens[0], tile_tokens[1:]
    kept = best(thumbnail, logits, len(thumbnail) * budget // num_patches)
    if tiles:
        sums = [0.0] * len(tiles)
        for i in thumbnail:
            sums[picture.block(*cells[i][1:]) - 1] += logits[i]
        power = [math.exp((total - max(sums)) / temperature) for total in sums]
        part = [weight / (sum(power) + 1e-8) for weight in power]
        scale = [min(1.0, budget / num_patches * (1 + weight - 1 / len(tiles))) for weight in part]
        sizes = list(map(len, tiles))
        quotas = split([a * b for a, b in zip(scale, sizes, strict=True)], sizes, budget - len(kept))
        resized_map = resize_map(picture, logits)
        for tile, quota in zip(tiles, quotas, strict=True):
            both = zip(unit([logits[i] for i in tile]), unit([resized_map[i] for i in tile]), strict=True)
            score = dict(zip(tile, (a + b for a, b in both), strict=True))
            kept += best(tile, score, quota)
    return sorted(kept + newlines[: keep - len(kept)])


@each("options", [{}, {"temperature": 0.5}])
@each("shift", [0.0, -4.0])  # the softmax over tiles must not underflow
@each("seed", range(6))
def test_globalcom2_equals_naive_loop(seed: int, shift: float, options: dict[str, Any]) -> None:
    counts = [len(picture.cells) for picture in PICTURES]
    keep = [max(1, int((0.01, 0.1, 0.34, 0.5, 0.9, 1.0)[seed] * count)) for count in counts]
    logits = views(PICTURES, keep, seed=seed).encoder_logits(-1) + shift
    tokens = views(PICTURES, keep, seed=seed, encoder_logits={-1: logits})
    got = chosen("globalcom2", tokens, **options)
    assert got == [naive_globalcom2(tokens, i, picture, **options) for i, picture in enumerate(PICTURES)]
    assert list(map(len, got)) == keep
    # A single image keeps the same tokens.
    for i, (picture, k) in enumerate(zip(PICTURES, keep, strict=True)):
        logits_of_image = {"encoder_logits": {-1: tokens.encoder_logits(-1)[i, None, :, : counts[i]]}}
        assert chosen("globalcom2", views([picture], [k], **logits_of_image), **options) == [got[i]]


def test_globalcom2_uniform_thumbnail_gives_tiles_equal_shares() -> None:
    """The first tiles get the remainder, and smaller tiles get fewer tokens."""
    picture = Picture(2, 2, side=4)
    for value in (0.0, 0.7, -3.0):
        flat = compute_scores(picture, lambda *cell, value=value: value)
        (kept,) = chosen("globalcom2", views([picture], [22], encoder_logits={-1: flat}))
        assert count_per_tile(picture, kept) == [4, 5, 5, 4, 4]
    picture = Picture(3, 1, side=5, above=3)  # 10, 25 and 10 tokens beside the thumbnail's 25
    (kept,) = chosen(
        "globalcom2", views([picture], [35], encoder_logits={-1: compute_scores(picture, lambda *cell: 0.0)})
    )
    assert count_per_tile(picture, kept) == [12, 5, 13, 5]


def test_globalcom2_salient_region_doubles_the_share_of_its_tile() -> None:
    """With p near 1, its share is r (2 - 1/n), and r (1 - 1/n) for the other tiles."""
    picture = Picture(2, 2, side=8)
    scores = compute_scores(picture, lambda tile, row, column: 100.0 * (tile == 0 and row < 4 and column >= 4))
    salient = {"encoder_logits": {-1: scores}}
    (kept,) = chosen("globalcom2", views([picture], [80], **salient))
    assert count_per_tile(picture, kept) == [16, 12, 28, 12, 12]
    (kept,) = chosen("globalcom2", views([picture], [240], **salient))  # scale is 1 at most
    assert count_per_tile(picture, kept) == [48, 43, 64, 43, 42]
