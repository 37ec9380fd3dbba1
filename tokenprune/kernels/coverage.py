# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the tokens that cover all others best: the next one adds most to how well each is covered.

What is to be covered are rows: the tokens themselves, words of a question, or both. A row is covered as well as by the
best that is taken. With each pick, fewer rows are covered better than before: what a candidate adds changes by these
alone, and is kept up to date with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.pairs import Products, Relation, TableRelation, normalize, round_cosines
from tokenprune.kernels.picks import Picks

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 2**20  # of how well candidates cover rows, so many in memory at a time
_NOTHING = 2.0**-40  # share of what a candidate added at first, below which it adds nothing: less is rounding


def cosines(a: Tensor, b: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """float32 `[S, A, B]`: cosine of each vector of `a` `[S, A, D]` to each of `b` `[S, B, D]` (None: of a).

    Those of `a` among themselves are to a multiple of 2**-20, so that equal vectors have exactly 1 and equal pairs
    equal cosines. A vector of zeros, or with NaN in it, is similar to nothing; so is padding of `a` (mask: bool `[S,
    A]`, False there).
    """
    first = normalize(a, mask)
    if b is not None:
        return first @ normalize(b).transpose(1, 2)
    return round_cosines(first @ first.transpose(1, 2))


def cosine_products(x: Tensor, mask: Tensor) -> Products:
    """`cosines(x, mask=mask)`, row by row."""
    return Products(normalize(x, mask), round_=True)


def _limits_of_gain(table: Tensor, cover: Tensor) -> str | None:
    fine = table.dtype == cover.dtype == torch.float32
    return None if fine else f"it takes float32, not {table.dtype} and {cover.dtype}"


@operation(kernel="tokenprune.kernels.coverage_triton:coverage_gain", limits=_limits_of_gain)
def coverage_gain(table: Tensor, cover: Tensor) -> Tensor:
    """float32 `[S, N]`: how much each candidate adds to how well all rows are covered.

    table: float32 `[S, R, N]`; cover: float32 `[S, R]`, how well each row is covered so far; inf leaves a row out.
    """
    return (table - cover.unsqueeze(2)).clamp_(min=0).sum(1)


class Coverage:
    """The coverage of rows by the taken candidates, and the gain of each other candidate.

    parts: how well each candidate covers rows. start: how well they are covered to begin with. On a GPU, where there
    are tables, all is summed up anew with each pick, which waits for nothing; else rows that a pick covers better are
    looked for.

    cover: for each part float32 `[S, R]`, how well its rows are covered.
    """

    def __init__(self, parts: Sequence[Relation], start: float = 0.0) -> None:
        self._parts, (segments, _, count), device = parts, parts[0].shape, parts[0].device
        for part in parts:
            if part.fits_in_memory:
                part.table  # noqa: B018 (rows are read from it then)
        self._anew = device.type != "cpu" and all(part.fits_in_memory for part in parts)
        self.cover = [
            torch.full((segments, part.shape[1]), start, dtype=torch.float32, device=device) for part in parts
        ]
        self._gain = torch.zeros(segments, count, dtype=torch.float64, device=device)
        if self._anew:
            self._sum_up()
            return
        for part, covered in zip(parts, self.cover, strict=True):
            for segment in range(segments):
                for index in _some(part, torch.arange(part.shape[1], device=device)):
                    before = covered[segment, index]
                    best = torch.maximum(part.rows(segment, index), before.unsqueeze(1))
                    self._gain[segment] += best.sum(0, dtype=torch.float64) - before.sum(dtype=torch.float64)
        self._least = self._gain * _NOTHING

    @property
    def gain(self) -> Tensor:
        """float32 `[S, N]`: the sum over rows of how much better they would be covered. Where it is kept up to date
        that is done in float64, whose rounding, which is not that of equal candidates alike, is left out here."""
        return self._gain.float()

    def take(self, pick: Tensor) -> None:
        """Take a candidate of each segment, long `[S]`."""
        if self._anew:
            rows = torch.arange(len(pick), device=pick.device)
            both = zip(self._parts, self.cover, strict=True)
            self.cover = [torch.maximum(cover, part.table[rows, :, pick]) for part, cover in both]
            self._sum_up()
            return
        for segment, place in enumerate(pick.tolist()):
            for part, cover in zip(self._parts, self.cover, strict=True):
                self._cover_better(part, segment, place, cover[segment])
        self._gain *= self._gain > self._least

    def _sum_up(self) -> None:
        gains = [coverage_gain(part.table, cover) for part, cover in zip(self._parts, self.cover, strict=True)]
        self._gain = torch.stack(gains).sum(0)

    def _cover_better(self, part: Relation, segment: int, place: int, cover: Tensor) -> None:
        better = (part.column(segment, place) > cover).nonzero().flatten()
        for index in _some(part, better):
            rows, before = part.rows(segment, index), cover.index_select(0, index)
            after = torch.maximum(before, rows[:, place])
            # What a candidate adds no more lies between how well a row was covered and how well it is now. (`clamp`
            # with a bound for each row takes ten times as long.)
            torch.maximum(rows, before.unsqueeze(1), out=rows)
            torch.minimum(rows, after.unsqueeze(1), out=rows)
            self._gain[segment] -= rows.sum(0, dtype=torch.float64) - before.sum(dtype=torch.float64)
            cover.index_copy_(0, index, after)


def _some(part: Relation, index: Tensor) -> Sequence[Tensor]:
    return index.split(max(1, _AT_ONCE // max(1, part.shape[2]))) if len(index) else ()


def _limits(table: Tensor, mask: Tensor, number: Tensor, most: int, factor: Tensor | None = None) -> str | None:
    return None if table.dtype == torch.float32 else f"it takes float32, not {table.dtype}"


@operation(kernel="tokenprune.kernels.coverage_triton:most_covering", limits=_limits)
def most_covering(table: Tensor, mask: Tensor, number: Tensor, most: int, factor: Tensor | None = None) -> Tensor:
    """bool `[S, N]`: take again and again the candidate that adds most to how well all rows are covered.

    table: float32 `[S, R, N]`, how well each candidate covers each row, 0 in rows of padding; mask: bool `[S, N]`, what
    can be taken; number: long `[S]`, how many to take, at most `most` and those of the mask. factor: float `[S, N]` or
    None, at least 0: what is added is multiplied with it. Of equal ones the lower index.
    """
    return _greedy([TableRelation(table)], mask, number, most, factor)


def greedy_cover(
    parts: Sequence[Relation], mask: Tensor, number: Tensor, most: int, factor: Tensor | None = None
) -> Tensor:
    """bool `[S, N]`: `most_covering`, of rows of which there may be too many for a table; on a GPU that waits for the
    device with each pick."""
    if not all(part.fits_in_memory for part in parts):
        return _greedy(parts, mask, number, most, factor)
    tables = [part.table for part in parts]
    return most_covering(tables[0] if len(tables) == 1 else torch.cat(tables, dim=1), mask, number, most, factor)


def _greedy(parts: Sequence[Relation], mask: Tensor, number: Tensor, most: int, factor: Tensor | None) -> Tensor:
    coverage, picks = Coverage(parts), Picks(mask)
    for step in range(most):
        gain = coverage.gain if factor is None else coverage.gain * factor
        pick = picks.take_best(picks.mask_taken(gain))
        if step + 1 < most:
            coverage.take(pick)
    return picks.first_picks(number)
