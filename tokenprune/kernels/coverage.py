# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the tokens that cover all others best (facility location).

The rows to cover are the tokens themselves, words of a question, or both. A row is covered as well as by the best
selected candidate. Each pick covers fewer rows better than the pick before, and only these rows change the gains of the
other candidates. So gains are updated and not recomputed.
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

    from tokenprune.kernels.host_greedy import HostCoverage

_MAX_ELEMENTS = 2**20  # entries of the table in memory at a time
_NEGLIGIBLE = 2.0**-40  # share of its first gain below which a candidate's gain is rounding error


def cosines(a: Tensor, b: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Compute the cosines of all vectors of `a` with all vectors of `b`.

    Zero and non-finite vectors have cosine 0 with all others. Without `b`, cosines are rounded to multiples of 2**-20,
    so that equal vectors have cosine 1 and equal pairs have equal cosines.

    Args:
        a: `[S, A, D]`.
        b: `[S, B, D]`. None is `a`.
        mask: Valid vectors of `a`, bool `[S, A]`. Others count as zeros.

    Returns:
        float32 `[S, A, B]`.
    """
    first = normalize(a, mask)
    if b is not None:
        return first @ normalize(b).transpose(1, 2)
    return round_cosines(first @ first.transpose(1, 2))


def cosine_products(x: Tensor, mask: Tensor) -> Products:
    """Return `cosines(x, mask=mask)` as `Products`, which compute rows on demand."""
    return Products(normalize(x, mask), round_=True)


def _describe_gain_limits(table: Tensor, cover: Tensor) -> str | None:
    fine = table.dtype == cover.dtype == torch.float32
    return None if fine else f"it takes float32, not {table.dtype} and {cover.dtype}"


@operation(kernel="tokenprune.kernels.coverage_triton:coverage_gain", limits=_describe_gain_limits)
def coverage_gain(table: Tensor, cover: Tensor) -> Tensor:
    """Compute how much each candidate would improve the coverage of all rows.

    The kernel adds up in another order, so gains agree within float32 rounding.

    Args:
        table: How well each candidate covers each row, float32 `[S, R, N]`.
        cover: Current coverage of each row, float32 `[S, R]`. inf excludes a row.

    Returns:
        `sum(max(table - cover, 0))` over rows, float32 `[S, N]`.

    Examples:
        >>> coverage_gain(torch.tensor([[[0.5, 1.0], [1.0, 0.0]]]), torch.tensor([[0.5, 0.5]])).tolist()
        [[0.5, 0.5]]
    """
    return (table - cover.unsqueeze(2)).clamp_(min=0).sum(1)


class Coverage:
    """Coverage of rows by the selected candidates, and the gain of each other candidate.

    On a GPU with tables, gains are recomputed after each pick, without synchronization. Otherwise, gains are updated
    for the rows that a pick covers better.

    Args:
        parts: How well each candidate covers rows. Each part adds rows.
        start: Initial coverage of every row.

    Attributes:
        cover: Current coverage of the rows of each part, float32 `[S, R]`.
        on_host: The same coverage as arrays, on the CPU.
    """

    def __init__(self, parts: Sequence[Relation], start: float = 0.0) -> None:
        self._parts, (segments, _, count), device = parts, parts[0].shape, parts[0].device
        self.on_host: HostCoverage | None = None
        for part in parts:
            if part.fits_in_memory:
                part.table  # noqa: B018 (builds the table, which later reads use)
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
                for index in _split_index(part, torch.arange(part.shape[1], device=device)):
                    before = covered[segment, index]
                    best = torch.maximum(part.rows(segment, index), before.unsqueeze(1))
                    self._gain[segment] += best.sum(0, dtype=torch.float64) - before.sum(dtype=torch.float64)
        self._least = self._gain * _NEGLIGIBLE
        if device.type == "cpu":
            from tokenprune.kernels.host_greedy import HostCoverage

            self.on_host = HostCoverage(parts, self.cover, self._gain, self._least, _MAX_ELEMENTS)

    @property
    def gain(self) -> Tensor:
        """Sum over rows of the possible improvement, float32 `[S, N]`.

        The running sum is float64. Rounding to float32 makes equal candidates tie.
        """
        return self._gain.float()

    def take(self, pick: Tensor) -> None:
        """Select one candidate per segment, long `[S]`."""
        if self._anew:
            rows = torch.arange(len(pick), device=pick.device)
            both = zip(self._parts, self.cover, strict=True)
            self.cover = [torch.maximum(cover, part.table[rows, :, pick]) for part, cover in both]
            self._sum_up()
            return
        if self.on_host is not None:
            self.on_host.take(pick.tolist())
            return
        for segment, candidate in enumerate(pick.tolist()):
            for part, cover in zip(self._parts, self.cover, strict=True):
                self._cover_better(part, segment, candidate, cover[segment])
        self._gain *= self._gain > self._least

    def _sum_up(self) -> None:
        gains = [coverage_gain(part.table, cover) for part, cover in zip(self._parts, self.cover, strict=True)]
        self._gain = torch.stack(gains).sum(0)

    def _cover_better(self, part: Relation, segment: int, candidate: int, cover: Tensor) -> None:
        better = (part.column(segment, candidate) > cover).nonzero().flatten()
        for index in _split_index(part, better):
            rows, before = part.rows(segment, index), cover.index_select(0, index)
            after = torch.maximum(before, rows[:, candidate])
            # Each candidate loses the gain between the old and the new coverage of a row. `clamp` with a bound per row
            # takes ten times as long.
            torch.maximum(rows, before.unsqueeze(1), out=rows)
            torch.minimum(rows, after.unsqueeze(1), out=rows)
            self._gain[segment] -= rows.sum(0, dtype=torch.float64) - before.sum(dtype=torch.float64)
            cover.index_copy_(0, index, after)


def _split_index(part: Relation, index: Tensor) -> Sequence[Tensor]:
    return index.split(max(1, _MAX_ELEMENTS // max(1, part.shape[2]))) if len(index) else ()


def _limits(table: Tensor, mask: Tensor, count: Tensor, max_count: int, factor: Tensor | None = None) -> str | None:
    return None if table.dtype == torch.float32 else f"it takes float32, not {table.dtype}"


@operation(kernel="tokenprune.kernels.coverage_triton:most_covering", limits=_limits)
def most_covering(table: Tensor, mask: Tensor, count: Tensor, max_count: int, factor: Tensor | None = None) -> Tensor:
    """Greedily select the candidates that improve the coverage of all rows most.

    Ties go to the lower index. The kernel computes gains in another order, so near-ties may resolve differently.

    Args:
        table: How well each candidate covers each row, float32 `[S, R, N]`, 0 in rows of padding.
        mask: Candidates, bool `[S, N]`.
        count: Number of candidates to select, long `[S]`, at most the number of candidates.
        max_count: Maximum of `count`.
        factor: Nonnegative factor of the gains, float `[S, N]`.

    Returns:
        Selected candidates, bool `[S, N]`.
    """
    return _pick_greedily([TableRelation(table)], mask, count, max_count, factor)


def greedy_cover(
    parts: Sequence[Relation], mask: Tensor, count: Tensor, max_count: int, factor: Tensor | None = None
) -> Tensor:
    """Call `most_covering` for parts that may be too large for tables.

    Without tables, each pick synchronizes with the GPU.
    """
    if not all(part.fits_in_memory for part in parts):
        return _pick_greedily(parts, mask, count, max_count, factor)
    tables = [part.table for part in parts]
    return most_covering(tables[0] if len(tables) == 1 else torch.cat(tables, dim=1), mask, count, max_count, factor)


def _pick_greedily(
    parts: Sequence[Relation], mask: Tensor, count: Tensor, max_count: int, factor: Tensor | None
) -> Tensor:
    coverage, picks = Coverage(parts), Picks(mask)
    if coverage.on_host is not None:
        from tokenprune.kernels.host_greedy import pick_covering

        return picks.first_picks(count, pick_covering(coverage.on_host, picks.bar, factor, max_count))
    for step in range(max_count):
        gain = coverage.gain if factor is None else coverage.gain * factor
        pick = picks.take_best(picks.mask_taken(gain))
        if step + 1 < max_count:
            coverage.take(pick)
    return picks.first_picks(count)
