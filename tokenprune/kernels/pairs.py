# SPDX-License-Identifier: Apache-2.0
"""Products of all pairs of vectors, with rows computed on demand.

BLAS rounding depends on the shape of a product, but not once it has several rows. So at least 16 rows are computed at a
time. An entry then has the same value wherever and whenever it is computed, and copies of a token tie.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels import farthest

if TYPE_CHECKING:
    from torch import Tensor

MIN_ROWS = 16  # minimum rows of a product
_SQUARE = 256  # tokens per block of `Products.diagonal`
_MAX_ELEMENTS = 2**22  # products in memory at a time, without a table
_STEPS = 2.0**20
_CANCELLED = 2.0**-40
_TINY = 1e-12


def is_finite(x: Tensor) -> Tensor:
    """Return True where all entries along the last axis are finite, bool."""
    return torch.linalg.vector_norm(x, torch.inf, dim=-1) < torch.inf


def normalize(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Normalize vectors along the last axis to length 1, in float32.

    Args:
        x: `[..., D]`.
        mask: Valid vectors, bool `[...]`.

    Returns:
        float32 `[..., D]`, zeros for zero, non-finite and invalid vectors.
    """
    x = x.float()
    length = x.norm(dim=-1, keepdim=True)  # non-finite if an entry is
    valid = length < torch.inf
    if mask is not None:
        valid = valid & mask.unsqueeze(-1)
    return (x / length.clamp(min=_TINY)).masked_fill_(~valid, 0)


def round_cosines(x: Tensor) -> Tensor:
    """Round `x` in place to multiples of 2**-20, so that equal vectors have a cosine of exactly 1."""
    return x.mul_(_STEPS).round_().div_(_STEPS)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute Euclidean distances of the vectors of `a` `[S, A, D]` and `b` `[S, B, D]`, all finite.

    Distances are computed from products in float64, an order of magnitude faster than from differences, after a
    shift by the first vector of `b`. A squared distance below 2**-40 of the squared lengths is cancellation error and
    set to 0, as between equal vectors.

    Returns:
        float32 `[S, A, B]`.
    """
    points = b.double()
    first = points[:, :1]
    far, points = None if a is b else a.double() - first, points - first
    norms = points.square().sum(2, keepdim=True)
    both = (norms if far is None else far.square().sum(2, keepdim=True)) + norms.transpose(1, 2)
    squared = torch.baddbmm(both, points if far is None else far, points.transpose(1, 2), alpha=-2)
    return squared.mul_(squared > both.mul_(_CANCELLED)).sqrt_().float()


class Products:
    """Products of the vectors of `a` with the vectors of `b`, in float32.

    The products are stored as a table if it is about as large as the vectors. Otherwise, rows are computed on demand.

    Args:
        a: `[S, R, D]`.
        b: `[S, N, D]`. None is `a`.
        round_: Round products to multiples of 2**-20. For unit vectors.
    """

    def __init__(self, a: Tensor, b: Tensor | None = None, round_: bool = False) -> None:
        self.a, self.b, self._round = a, a if b is None else b, round_
        self.shape = (len(a), a.shape[1], self.b.shape[1])

    @property
    def fits_in_memory(self) -> bool:
        """True if the table of all products is small enough to be kept in memory."""
        return self.shape[1] * self.shape[2] <= max(self.b.shape[1] * self.b.shape[2], farthest.TABLE**2)

    @cached_property
    def table(self) -> Tensor:
        """All products, float32 `[S, R, N]`. Later reads of rows use the table."""
        return self._done(self.a @ self.b.transpose(1, 2))

    def rows(self, segment: int, index: Tensor) -> Tensor:
        """Return the rows `index` (long `[n]`) of a segment, float32 `[n, N]`."""
        if "table" in self.__dict__:
            return self.table[segment].index_select(0, index)
        short = MIN_ROWS - len(index)
        few = index if short <= 0 or not len(index) else torch.cat([index, index[:1].expand(short)])
        return self._done(self.a[segment, few] @ self.b[segment].T)[: len(index)]

    def column(self, segment: int, index: int) -> Tensor:
        """Return the products of all vectors of a segment with vector `index` of b, float32 `[R]`."""
        vector = self.b[segment, index].expand(MIN_ROWS, -1)
        return self._done(vector @ self.a[segment].T)[0]

    def segment_rows(self, index: Tensor) -> Tensor:
        """Return one row per segment, float32 `[S, N]`, by index (long `[S]`). Does not synchronize with the device."""
        segment = torch.arange(len(index), device=index.device)
        if "table" in self.__dict__:
            return self.table[segment, index]
        return self._done(self.a[segment, index].unsqueeze(1) @ self.b.transpose(1, 2)).squeeze(1)

    def diagonal(self) -> Tensor:
        """Return the products of each vector with the vector of the same index, float32 `[S, N]`.

        The values equal the diagonal of the table.
        """
        count, results = self.shape[1], []
        for start in range(0, count, _SQUARE):
            first = max(0, min(start, count - _SQUARE))
            block = slice(first, first + _SQUARE)
            square = self.a[:, block] @ self.b[:, block].transpose(1, 2)
            results.append(square.diagonal(dim1=1, dim2=2)[:, start - first :])
        return self._done(torch.cat(results, dim=1)) if results else self.a.new_zeros(self.shape[0], 0)

    def reduce_rows(self, reduce: Callable[[Tensor, int, int], Tensor]) -> Tensor:
        """Apply `reduce(rows, segment, start)` to blocks of rows and return the results, `[S, R]`.

        `rows` is float32 `[n, N]`, the rows from index `start` on. `reduce` returns `[n]`.
        """
        step = max(MIN_ROWS, _MAX_ELEMENTS // max(1, self.shape[2]))
        index, results = torch.arange(self.shape[1], device=self.a.device), []
        for segment in range(self.shape[0]):
            computed = (self.rows(segment, part) for part in index.split(step))
            blocks = self.table[segment].split(step) if self.fits_in_memory else computed
            results.append(torch.cat([reduce(rows, segment, block * step) for block, rows in enumerate(blocks)]))
        return torch.stack(results)

    def _done(self, x: Tensor) -> Tensor:
        return round_cosines(x) if self._round else x


class Relation:
    """A relation of R vectors with N others, computed from their products row by row.

    Args:
        products: Products of the vectors.
        value: Elementwise function of products `[..., n, N]` and one value per row from each of `each`, as `[..., n,
            1]`.
        each: Tensors of one value per row, `[S, R]`.
    """

    def __init__(self, products: Products, value: Callable[..., Tensor] = lambda x: x, *each: Tensor) -> None:
        self.products, self._value, self._each = products, value, each
        self.shape, self.fits_in_memory, self.device = products.shape, products.fits_in_memory, products.a.device

    @cached_property
    def table(self) -> Tensor:
        """All values, `[S, R, N]`. Later reads of rows use the table."""
        table = self.products.table
        del self.products.table  # free the memory of the products
        return self._value(table, *(x.unsqueeze(2) for x in self._each))

    def rows(self, segment: int, index: Tensor) -> Tensor:
        """Return the rows `index` (long `[n]`) of a segment, `[n, N]`."""
        if "table" in self.__dict__:
            return self.table[segment].index_select(0, index)
        return self._value(self.products.rows(segment, index), *(x[segment, index].unsqueeze(1) for x in self._each))

    def column(self, segment: int, index: int) -> Tensor:
        """Return the values of all rows of a segment at column `index`, `[R]`."""
        if "table" in self.__dict__:
            return self.table[segment, :, index]
        column = self.products.column(segment, index).unsqueeze(1)
        return self._value(column, *(x[segment].unsqueeze(1) for x in self._each)).squeeze(1)


class TableRelation(Relation):
    """A relation given as a table `[S, R, N]`."""

    def __init__(self, table: Tensor) -> None:
        segments, rows, columns = table.shape
        self.table, self.shape, self.fits_in_memory, self.device = table, (segments, rows, columns), True, table.device


class PickedRows:
    """Rows of tokens that are picked one after the other.

    On the CPU, a pick also computes the rows of the likeliest next picks: 16 rows take little longer than one, because
    each row reads all vectors. On other devices, one row is computed, without synchronization.
    """

    def __init__(self, products: Products) -> None:
        self.products = products
        self._held: list[dict[int, Tensor]] = [{} for _ in range(products.shape[0])]

    def __call__(self, pick: Tensor, score: Tensor) -> Tensor:
        """Return the row of each segment's pick.

        Args:
            pick: long `[S]`.
            score: Scores that picks are chosen by, `[S, N]`.

        Returns:
            float32 `[S, N]`.
        """
        if pick.device.type != "cpu":
            return self.products.segment_rows(pick)
        places = enumerate(pick.tolist())
        return torch.stack([self.row(segment, index, score[segment]) for segment, index in places])

    def row(self, segment: int, pick: int, score: Tensor) -> Tensor:
        """Return the row of one segment's pick on the CPU, float32 `[N]`. `score` is `[N]`."""
        held = self._held[segment]
        if pick not in held:
            likely = score.topk(min(MIN_ROWS, len(score)) - 1).indices
            index = torch.cat([likely.new_tensor([pick]), likely])
            held = dict(zip(index.tolist(), self.products.rows(segment, index), strict=True))
            self._held[segment] = held
        return held[pick]
