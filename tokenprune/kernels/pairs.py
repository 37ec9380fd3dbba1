# SPDX-License-Identifier: Apache-2.0
"""Products of all pairs of vectors, of which a method needs some rows: made as they are asked for.

A BLAS rounds a product by its shape, but no longer once it has a few rows. So rows are made at least 16 at a time, and
what stands in two places, or is made twice, is the same number: copies of a token tie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels import farthest

if TYPE_CHECKING:
    from torch import Tensor

MIN_ROWS = 16  # rows of a product
_SQUARE = 256  # tokens whose products with themselves are made at a time
_AT_ONCE = 2**22  # products in memory at a time, where there is no table
_STEPS = 2.0**20
_CANCELLED = 2.0**-40
_TINY = 1e-12


def is_finite(x: Tensor) -> Tensor:
    """Return bool, True where all of the last axis is finite."""
    return torch.linalg.vector_norm(x, torch.inf, dim=-1) < torch.inf


def normalize(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """float32, of length 1 along the last axis; zeros where there is nothing to point at, or a mask (bool, an axis
    less) is False."""
    x = x.float()
    length = x.norm(dim=-1, keepdim=True)  # not finite where an entry is not
    real = length < torch.inf
    if mask is not None:
        real = real & mask.unsqueeze(-1)
    return (x / length.clamp(min=_TINY)).masked_fill_(~real, 0)


def round_cosines(x: Tensor) -> Tensor:
    """`x`, which is changed, to a multiple of 2**-20: so that equal vectors have cosines of exactly 1."""
    return x.mul_(_STEPS).round_().div_(_STEPS)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """float32 `[S, A, B]`: Euclidean distance of each vector of `a` `[S, A, D]` to each of `b` `[S, B, D]`, all finite.

    By products in float64, which are an order of magnitude faster than differences, of what vectors are beside the
    first of `b`. A squared distance below 2**-40 of the squared lengths is what cancelled: 0, as between equal ones.
    """
    near = b.double()
    first = near[:, :1]
    far, near = None if a is b else a.double() - first, near - first
    own = near.square().sum(2)
    both = (own if far is None else far.square().sum(2)).unsqueeze(2) + own.unsqueeze(1)
    squared = torch.baddbmm(both, near if far is None else far, near.transpose(1, 2), alpha=-2)
    return squared.mul_(squared > both.mul_(_CANCELLED)).sqrt_().float()


class Products:
    """Products of each vector of `a` `[S, R, D]` with each of `b` `[S, N, D]` (None: those of a), float32.

    They are held as a table where they are about as many as the features; else a row is made when it is asked for.
    round_: to a multiple of 2**-20, for vectors of length 1.
    """

    def __init__(self, a: Tensor, b: Tensor | None = None, round_: bool = False) -> None:
        self.a, self.b, self._round = a, a if b is None else b, round_
        self.shape = (len(a), a.shape[1], self.b.shape[1])

    @property
    def fits_in_memory(self) -> bool:
        """Return True if all products are to be held in memory."""
        return self.shape[1] * self.shape[2] <= max(self.b.shape[1] * self.b.shape[2], farthest.TABLE**2)

    @cached_property
    def table(self) -> Tensor:
        """float32 `[S, R, N]`: all of them. Once it is made, rows are read from it."""
        return self._done(self.a @ self.b.transpose(1, 2))

    def rows(self, segment: int, index: Tensor) -> Tensor:
        """float32 `[n, N]`: the rows of a segment with these indices, long `[n]`."""
        if "table" in self.__dict__:
            return self.table[segment].index_select(0, index)
        short = MIN_ROWS - len(index)
        few = index if short <= 0 or not len(index) else torch.cat([index, index[:1].expand(short)])
        return self._done(self.a[segment, few] @ self.b[segment].T)[: len(index)]

    def column(self, segment: int, place: int) -> Tensor:
        """float32 `[R]`: of all vectors of a segment with the one of b at this place."""
        one = self.b[segment, place].expand(MIN_ROWS, -1)
        return self._done(one @ self.a[segment].T)[0]

    def segment_rows(self, place: Tensor) -> Tensor:
        """float32 `[S, N]`: the row of each segment with its index, long `[S]`; asks the device nothing."""
        segment = torch.arange(len(place), device=place.device)
        if "table" in self.__dict__:
            return self.table[segment, place]
        return self._done(self.a[segment, place].unsqueeze(1) @ self.b.transpose(1, 2)).squeeze(1)

    def diagonal(self) -> Tensor:
        """float32 `[S, N]`: of each vector with its namesake, as it stands in the table."""
        count, found = self.shape[1], []
        for start in range(0, count, _SQUARE):
            first = max(0, min(start, count - _SQUARE))
            block = slice(first, first + _SQUARE)
            square = self.a[:, block] @ self.b[:, block].transpose(1, 2)
            found.append(square.diagonal(dim1=1, dim2=2)[:, start - first :])
        return self._done(torch.cat(found, dim=1)) if found else self.a.new_zeros(self.shape[0], 0)

    def reduce_rows(self, reduce: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """`[S, R]`: `reduce(rows, segment, start)` of all rows, `[n]` for float32 `[n, N]`, those from `start` on. They
        are a few at a time, where there is no table; else it is made and kept."""
        step = max(MIN_ROWS, _AT_ONCE // max(1, self.shape[2]))
        index, found = torch.arange(self.shape[1], device=self.a.device), []
        for segment in range(self.shape[0]):
            made = (self.rows(segment, some) for some in index.split(step))
            blocks = self.table[segment].split(step) if self.fits_in_memory else made
            found.append(torch.cat([reduce(rows, segment, at * step) for at, rows in enumerate(blocks)]))
        return torch.stack(found)

    def _done(self, x: Tensor) -> Tensor:
        return round_cosines(x) if self._round else x


class Relation:
    """The relation between each of R vectors and N others, computed from their products row by row.

    value: of products `[..., n, N]` and one entry of each of `each` (`[S, R]`, as `[..., n, 1]`) per row, element by
    element, what stands there.
    """

    def __init__(self, products: Products, value: Callable[..., Tensor] = lambda x: x, *each: Tensor) -> None:
        self.products, self._value, self._each = products, value, each
        self.shape, self.fits_in_memory, self.device = products.shape, products.fits_in_memory, products.a.device

    @cached_property
    def table(self) -> Tensor:
        """`[S, R, N]`. Once it is made, rows are read from it."""
        table = self.products.table
        del self.products.table  # one is enough
        return self._value(table, *(x.unsqueeze(2) for x in self._each))

    def rows(self, segment: int, index: Tensor) -> Tensor:
        """`[n, N]`: the rows of a segment with these indices, long `[n]`."""
        if "table" in self.__dict__:
            return self.table[segment].index_select(0, index)
        return self._value(self.products.rows(segment, index), *(x[segment, index].unsqueeze(1) for x in self._each))

    def column(self, segment: int, place: int) -> Tensor:
        """`[R]`: what stands between all of a segment and the other vector at this place."""
        if "table" in self.__dict__:
            return self.table[segment, :, place]
        column = self.products.column(segment, place).unsqueeze(1)
        return self._value(column, *(x[segment].unsqueeze(1) for x in self._each)).squeeze(1)


class TableRelation(Relation):
    """A relation that is given as a table, `[S, R, N]`."""

    def __init__(self, table: Tensor) -> None:
        segments, rows, columns = table.shape
        self.table, self.shape, self.fits_in_memory, self.device = table, (segments, rows, columns), True, table.device


class PickedRows:
    """The rows of tokens that are picked one after the other.

    On the host the rows of the likeliest next picks are made with that of a pick: 16 rows take little longer than one,
    whose vectors have all to be read. Elsewhere it is one row, and nothing is asked of the device.
    """

    def __init__(self, products: Products) -> None:
        self.products = products
        self._held: list[dict[int, Tensor]] = [{} for _ in range(products.shape[0])]

    def __call__(self, pick: Tensor, score: Tensor) -> Tensor:
        """float32 `[S, N]`: the row of each segment's pick, long `[S]`. score: `[S, N]`, that picks are chosen by."""
        if pick.device.type != "cpu":
            return self.products.segment_rows(pick)
        places = enumerate(pick.tolist())
        return torch.stack([self.row(segment, place, score[segment]) for segment, place in places])

    def row(self, segment: int, place: int, score: Tensor) -> Tensor:
        """float32 `[N]`: the row of one segment's pick, on the host. score: `[N]`."""
        held = self._held[segment]
        if place not in held:
            likely = score.topk(min(MIN_ROWS, len(score)) - 1).indices
            index = torch.cat([likely.new_tensor([place]), likely])
            held = dict(zip(index.tolist(), self.products.rows(segment, index), strict=True))
            self._held[segment] = held
        return held[place]
