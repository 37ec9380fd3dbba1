# SPDX-License-Identifier: Apache-2.0
"""Loops and index computations of selections on the CPU, in NumPy.

They consist of many small operations, and a call of NumPy takes a fraction of the time of a call of
PyTorch. Additions, products, quotients and comparisons have equal results in both. Matrix products,
sums and roots, whose rounding differs, are PyTorch's. The arrays share memory with tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenprune.kernels.pairs import MIN_ROWS, Products, Relation


def pick_farthest(table: Tensor, num_picks: int) -> Tensor:
    """Select tokens that are farthest from each other. See `farthest`.

    Args:
        table: Similarity of all pairs, float32 `[N, N]`, -inf on the diagonal.
        num_picks: Number of tokens to select.

    Returns:
        Selected tokens, bool `[N]`.
    """
    table = table.detach()
    rows, distance = table.numpy(), (1 - table.amax(dim=1)).numpy()
    taken = np.zeros(len(rows), dtype=bool)
    for step in range(num_picks):
        pick = distance.argmax()
        taken[pick] = True
        distance = 1 - rows[pick] if step == 0 else np.minimum(distance, 1 - rows[pick], out=distance)
        distance[pick] = -np.inf
    return torch.from_numpy(taken)


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


def take_in_turn(score: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Let pickers in turn select tokens. See `take.take_in_turn`.

    Args:
        score: Scores without NaN, float32 `[S, P, N]`.
        mask: Candidates, bool `[S, N]`.
        count: Number of tokens of each picker, long `[S, P]`.

    Returns:
        Selected tokens, bool `[S, N]`.
    """
    least, available, counts = -score.numpy(), mask.numpy(), count.tolist()
    left = available.copy()
    for segment, numbers in enumerate(counts):
        row = left[segment]
        for turn, num_tokens in enumerate(numbers):
            # NaN sorts last, so that -inf is a valid score.
            order = np.where(row, least[segment, turn], np.float32(np.nan)).argsort(kind="stable")
            row[order[: max(0, int(num_tokens))]] = False
    return torch.from_numpy(available ^ left)


def find_destinations(
    assign: Tensor, mask: Tensor, output_index: Tensor, weight: Tensor | None, num_outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `join.destinations` on the CPU."""
    index, outputs = assign.numpy(), output_index.numpy()
    weights = np.ones(outputs.shape, dtype=np.float32) if weight is None else weight.detach().float().numpy()
    absorbed = mask.numpy() & (index >= 0)
    itself = absorbed & (index == np.arange(outputs.shape[1]))
    own_weight = np.zeros(num_outputs, dtype=np.float32)
    own_weight[outputs[itself]] = weights[itself]
    joined = np.take_along_axis(outputs, np.maximum(index, 0), axis=1)
    target = np.where(absorbed & ~itself, joined, num_outputs)
    return tuple(torch.from_numpy(array.reshape(-1)) for array in (own_weight, target, weights))  # type: ignore[return-value]


def order_sources(source: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order sources by their target. See `join.join`.

    Returns:
        The order and the sources in this order, both `[r]`; the number of the target of each source, `[r]`; and the
        target of each number, `[r]`, `count` for unused numbers. All long.
    """
    targets = target.numpy()
    order = targets.argsort(kind="stable")
    targets = targets[order]
    slot = np.concatenate([np.zeros(1, dtype=np.int64), (np.diff(targets) != 0).cumsum()])[: len(targets)]
    row = np.full_like(targets, count)
    row[slot] = targets
    return tuple(map(torch.from_numpy, (order, source.numpy()[order], slot, row)))  # type: ignore[return-value]


def rank_in_group(group: Tensor, *keys: Tensor) -> Tensor:
    """Do as `take.rank_in_group` on the CPU."""
    groups = group.numpy()
    columns: list[np.ndarray] = []
    for key in keys:
        values = (key.float() if key.dtype == torch.bfloat16 else key).detach().numpy()
        if values.dtype.kind == "f":
            has_value = ~np.isnan(values)
            columns += [has_value, np.where(has_value, -values, 0)]  # NaN is largest
        else:
            columns.append(~values)  # the largest first, without overflow
    order = np.lexsort((*columns[::-1], groups), axis=-1)
    in_order, index = np.take_along_axis(groups, order, axis=1), np.arange(groups.shape[1])
    is_first = np.concatenate([np.ones_like(in_order[:, :1], dtype=bool), np.diff(in_order, axis=1) != 0], axis=1)
    start = np.maximum.accumulate(np.where(is_first[:, : len(index)], index, 0), axis=1)
    ranks = np.empty(groups.shape, dtype=np.int64)
    np.put_along_axis(ranks, order, index - start, axis=1)
    return torch.from_numpy(ranks)
