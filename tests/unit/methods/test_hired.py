# SPDX-License-Identifier: Apache-2.0
"""hired against a naive loop."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch

from anyres_views import PICTURES, Picture, split, views
from each import each
from tokenprune import OptionError
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, chosen


def naive(tokens: VisualTokens, image: int, picture: Picture, alpha: float = 0.5, mode: str = "blocks") -> list[int]:
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
def test_equals_naive_loop(ties: bool, options: dict[str, Any]) -> None:
    counts = [len(one.cells) for one in PICTURES]
    for seed, share in enumerate((0.01, 0.1, 0.34, 0.5, 0.9, 1.0)):
        keep = [max(1, int(share * count)) for count in counts]
        tokens = views(PICTURES, keep, seed=seed, ties=ties)
        got = chosen("hired", tokens, **options)
        assert got == [naive(tokens, i, one, **options) for i, one in enumerate(PICTURES)]
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


def at(picture: Picture, value: Any) -> torch.Tensor:
    """float `[1, 1, N]`: an attention that is a function of the cell."""
    return torch.tensor([[[float(value(*cell)) for cell in picture.cells]]])


def test_constant_attention_marks_the_first_half() -> None:
    """The upper two of 2 x 2 tiles get the whole budget, because ties go to the lower index."""
    picture = Picture(2, 2, side=8)
    flat = at(picture, lambda tile, row, column: tile == 0)
    (kept,) = chosen("hired", views([picture], [64], encoder_attention={0: flat, -1: flat}))
    assert numbers(picture, kept) == [32, 16, 16, 0, 0]


def test_salient_tile_gets_the_largest_budget() -> None:
    """32 of 64 cells are marked. All 16 cells of a salient quadrant are among these, so its tile gets at least half."""
    picture = Picture(2, 2, side=8)
    hot = at(picture, lambda tile, row, column: (tile == 0) * (2 * (row >= 4 and column >= 4) + (row < 4) * row / 9))
    given = {"encoder_attention": {0: hot, -1: hot}}
    (kept,) = chosen("hired", views([picture], [60], **given))
    assert numbers(picture, kept) == [30, 8, 7, 0, 15]  # marks are 8, 8, 0, 16
    (kept,) = chosen("hired", views([picture], [60], **given), mode="bands")
    assert numbers(picture, kept) == [30, 0, 15, 8, 7]  # two rows of the thumbnail each: 0, 16, 8, 8


def test_budget_beyond_a_full_tile_goes_to_others() -> None:
    """Tiles with much padding keep all their tokens, and the thumbnail gets the remainder."""
    picture = Picture(2, 1, above=3)  # of each tile one row of four
    (kept,) = chosen("hired", views([picture], [20]))
    assert numbers(picture, kept) == [12, 4, 4]
    (kept,) = chosen("hired", views([picture], [25]))  # one of the two newlines goes
    assert numbers(picture, kept) == [16, 4, 4] and len(kept) == 25


def test_only_the_thumbnail_is_marked() -> None:
    """Late attention ranks within a tile. Early attention of tiles has no effect."""
    picture = Picture(2, 2)
    tokens = views([picture], [30])
    (kept,) = chosen("hired", tokens)
    early, late = tokens.encoder_attention(0).clone(), tokens.encoder_attention(-1).clone()
    late[..., kept[-1]] += 1
    early[..., 16:] = 7
    (other,) = chosen("hired", views([picture], [30], encoder_attention={0: early, -1: late}))
    assert other == kept


@pytest.mark.parametrize("wrong", [{"alpha": -0.1}, {"alpha": 1.5}, {"alpha": "x"}, {"mode": "rows"}], ids=str)
def test_invalid_option_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"hired.*{next(iter(wrong))}"):
        chosen("hired", views([Picture()], [4]), **wrong)
