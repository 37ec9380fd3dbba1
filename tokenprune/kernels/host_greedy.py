# SPDX-License-Identifier: Apache-2.0
"""Greedy selections by determinants and by coverage on the CPU, in NumPy. See `host_loops`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenprune.kernels.pairs import MIN_ROWS, Products, Relation


class _Rows:
    """Rows of products, as arrays. See `PickedRows`."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._held: list[dict[int, np.ndarray]] = [{} for _ in range(products.shape[0])]

    def get(self, segment: int, pick: int, score: np.ndarray) -> np.ndarray:
        """Return the row of a pick, float32 `[N]`. `score` is `[N]`: the likeliest next picks are computed too."""
        if pick not in self._held[segment]:
            likely = torch.from_numpy(score).topk(min(MIN_ROWS, len(score)) - 1).indices.numpy()
            index = np.concatenate([[pick], likely])
            rows = self._products.rows(segment, torch.from_numpy(index)).detach().numpy()
            self._held[segment] = dict(zip(index.tolist(), rows, strict=True))
        return self._held[segment][pick]


def pick_independent(
    products: Products, bar: Tensor, diagonal: Tensor, least: Tensor, last: Tensor, ridge: float, num_picks: int
) -> Tensor:
    """Select tokens by the determinant of their products. See `greedy_dpp`.

    Args:
        products: Products of the tokens.
        bar: 0 at candidates and -inf elsewhere, float32 `[S, N]`. Selected tokens are set to -inf.
        diagonal: Products of each token with itself, float32 `[S, N]`.
        least: Conditional variance below which a token is dependent, float32 `[S, N]`.
        last: Scores of dependent tokens, float32 `[S, N]`.
        ridge: Constant added to the diagonal.
        num_picks: Number of tokens to select.

    Returns:
        Selected tokens in order, long `[S, num_picks]`.
    """
    products_of, rows, tiny = _Rows(products), np.arange(len(diagonal)), np.finfo(np.float32).tiny
    diagonal = diagonal.detach()
    left, bars, bounds, scores = diagonal.numpy(), bar.numpy(), least.detach().numpy(), last.detach().numpy()
    factor = diagonal.new_zeros(len(diagonal), num_picks, diagonal.shape[1])
    product = torch.empty_like(factor[:, :1])
    factors, explained = factor.numpy(), product.numpy()[:, 0]
    taken = np.zeros((len(diagonal), num_picks), dtype=np.int64)
    for step in range(num_picks):
        is_new = left > bounds
        score = np.where(is_new, left, scores) + bars
        pick = taken[:, step] = score.argmax(1)
        bars[rows, pick] = -np.inf
        has_new = is_new[rows, pick]
        if not has_new.any():
            continue  # rows of dependent tokens are 0
        row = np.stack([products_of.get(segment, index, score[segment]) for segment, index in enumerate(pick.tolist())])
        if step:
            # Memory of PyTorch: BLAS rounds products of other alignments differently.
            earlier = factor.new_empty(len(factor), 1, step)
            earlier.numpy()[:, 0] = factors[rows, :step, pick]
            torch.bmm(earlier, factor[:, :step], out=product)
            row -= explained
        variance = np.maximum(left[rows, pick] + np.float32(ridge), tiny)[:, None]
        row /= torch.from_numpy(variance).sqrt_().numpy()  # PyTorch's root is not always the nearest float
        row[~has_new] = 0
        factors[:, step] = row
        left = np.maximum(left - np.square(row), 0)
    return torch.from_numpy(taken)


class HostCoverage:
    """Coverage of rows on the CPU, which shares memory with a `Coverage`.

    Args:
        parts: How well each candidate covers rows.
        cover: Coverage of the rows of each part, float32 `[S, R]`.
        gain: Gains of all candidates, float64 `[S, N]`.
        least: Gains that count as 0, float64 `[S, N]`.
        max_entries: Entries of the table in memory at a time.
    """

    def __init__(
        self, parts: Sequence[Relation], cover: Sequence[Tensor], gain: Tensor, least: Tensor, max_entries: int
    ) -> None:
        self.gain, self._least, self._max_entries = gain.numpy(), least.numpy(), max_entries
        tables = [part.table.detach().numpy() if part.fits_in_memory else None for part in parts]
        self._parts = list(zip(parts, tables, [tensor.numpy() for tensor in cover], strict=True))

    def take(self, picks: Sequence[int]) -> None:
        """Select one candidate per segment."""
        for segment, candidate in enumerate(picks):
            for part, table, cover in self._parts:
                entries = None if table is None else table[segment]
                self._cover_better(part, segment, candidate, cover[segment], entries)
        self.gain *= self.gain > self._least

    def _cover_better(
        self, part: Relation, segment: int, candidate: int, cover: np.ndarray, table: np.ndarray | None
    ) -> None:
        column = part.column(segment, candidate).numpy() if table is None else table[:, candidate]
        better, max_rows = np.flatnonzero(column > cover), max(1, self._max_entries // max(1, part.shape[2]))
        for start in range(0, len(better), max_rows):
            index = better[start : start + max_rows]
            rows = part.rows(segment, torch.from_numpy(index)).numpy() if table is None else table[index]
            before = cover[index]
            after = np.maximum(before, rows[:, candidate])
            # Each candidate loses the gain between the old and the new coverage of a row.
            np.maximum(rows, before[:, None], out=rows)
            np.minimum(rows, after[:, None], out=rows)
            lost = torch.from_numpy(rows).sum(0, dtype=torch.float64).numpy()
            self.gain[segment] -= lost - torch.from_numpy(before).sum(dtype=torch.float64).item()
            cover[index] = after


def pick_covering(coverage: HostCoverage, bar: Tensor, factor: Tensor | None, num_picks: int) -> Tensor:
    """Select the candidates that improve a coverage most. See `most_covering`.

    Args:
        coverage: Coverage before the first pick.
        bar: 0 at candidates and -inf elsewhere, float32 `[S, N]`. Selected tokens are set to -inf.
        factor: Factor of the gains, float32 `[S, N]`, or None.
        num_picks: Number of candidates to select.

    Returns:
        Selected candidates in order, long `[S, num_picks]`.
    """
    bars = bar.numpy()
    factors: np.ndarray | None = None
    if factor is not None:
        factors = (factor if factor.dtype == torch.float64 else factor.float()).detach().numpy()
    rows, taken = np.arange(len(bars)), np.zeros((len(bars), num_picks), dtype=np.int64)
    for step in range(num_picks):
        gain = coverage.gain.astype(np.float32)
        pick = taken[:, step] = ((gain if factors is None else gain * factors) + bars).argmax(1)
        bars[rows, pick] = -np.inf
        if step + 1 < num_picks:
            coverage.take(pick.tolist())
    return torch.from_numpy(taken)
