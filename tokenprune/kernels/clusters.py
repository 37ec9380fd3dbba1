# SPDX-License-Identifier: Apache-2.0
"""Clusters of tokens: density peaks, chains over frames, and connected components of a similarity graph.

R rows (frames or parts of videos) are clustered independently, and padding has no effect. Operations that need an N x N
matrix per row process a few rows at a time. Similarities are cosines in float32; a zero or non-finite vector is similar
to no other. These are plain PyTorch operations. Only connected components synchronize with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.coverage import greedy_cover
from tokenprune.kernels.density import density_peaks
from tokenprune.kernels.host_checks import is_all_finite, is_all_true
from tokenprune.kernels.pairs import (
    MIN_ROWS,
    PickedRows,
    Products,
    Relation,
    distances,
    is_finite,
    normalize,
)
from tokenprune.kernels.picks import Picks

if TYPE_CHECKING:
    from torch import Tensor

_NEIGHBOURS = 7  # neighbors in the density estimate
_MAX_ELEMENTS = 2**24  # matrix elements in memory at a time
_MIN_COLUMNS = 256  # minimum columns of a product: BLAS rounds narrow products differently
_PAIRS, _SAMPLED = 32, 64  # approximate stored pairs per token; tokens in the sample that sets the threshold


def split_rows(rows: int, entries: int) -> Iterator[slice]:
    """Yield slices of `rows` rows, such that matrices of `entries` elements per row fit in memory."""
    step = max(1, _MAX_ELEMENTS // max(1, entries))
    return (slice(start, start + step) for start in range(0, rows, step))


def cluster_density_peaks(
    x: Tensor, mask: Tensor, count: Tensor, max_count: int, capped: bool = True
) -> tuple[Tensor, Tensor]:
    """Cluster tokens around density peaks (DPC-KNN), with 7 neighbors in the density.

    Args:
        x: Tokens, `[R, N, D]`.
        mask: Valid tokens, bool `[R, N]`.
        count: Number of centres, long `[R]`.
        max_count: Maximum of `count`.
        capped: Limit the neighbors in the density to the number of centres.

    Returns:
        Centres, bool `[R, N]`, and the index of each token's nearest centre, long `[R, N]`. A centre has its own index.
        The index is -1 at padding and in rows without a centre.
    """
    centres = find_density_peaks(x, mask, count, max_count, capped=capped)
    return centres, assign_to_centres(x, mask, centres, max_count)


def find_density_peaks(
    x: Tensor, mask: Tensor, count: Tensor, max_count: int, neighbours: int = _NEIGHBOURS, capped: bool = True
) -> Tensor:
    """Return the density peaks of each row, bool `[R, N]`. See `density_peaks`; this processes a few rows at a time."""

    def select_rows(x: Tensor, mask: Tensor, count: Tensor) -> Tensor:
        return density_peaks(x, mask, count, neighbours, max_count, capped)

    return map_rows(select_rows, x.shape[1] ** 2, x, mask, count)


def assign_to_centres(x: Tensor, mask: Tensor, centres: Tensor, max_count: int) -> Tensor:
    """Return the index of each token's nearest centre by Euclidean distance, long `[R, N]`.

    A centre has its own index. The index is -1 at padding and in rows without a centre. Non-finite tokens count as
    zeros.

    Args:
        x: Tokens, `[R, N, D]`.
        mask: Valid tokens, bool `[R, N]`.
        centres: bool `[R, N]`.
        max_count: At least the largest number of centres in a row.
    """
    x = x.float() if is_all_finite(x) else x.float().masked_fill(~is_finite(x).unsqueeze(-1), 0)
    centre_index = partition(centres)[:, : max(1, max_count)]
    allowed = centres.gather(1, centre_index)

    def find_nearest(x: Tensor, centre_index: Tensor, allowed: Tensor) -> Tensor:
        distance = distances(x, gather_tokens(x, centre_index, 1))
        if not is_all_true(allowed):
            distance = distance.masked_fill(~allowed.unsqueeze(1), torch.inf)
        return centre_index.gather(1, distance.min(2).indices)

    assigned = map_rows(find_nearest, x.shape[1] * centre_index.shape[1], x, centre_index, allowed)
    assigned = torch.where(centres, torch.arange(mask.shape[1], device=mask.device), assigned)
    if is_all_true(mask) and is_all_true(allowed):
        return assigned
    return assigned.masked_fill(~(mask & allowed[:, :1]), -1)


def select_farthest_weighted(
    x: Tensor, mask: Tensor, weight: Tensor, count: Tensor, max_count: int, weigh_first: bool = True
) -> Tensor:
    """Select tokens that are far from each other, with a weight per token (FlashVID).

    The score of a token is its weight times the cosine distance to the nearest selected token. The first pick uses the
    distance to the nearest other token. With equal weights this selects the tokens of DivPrune.

    Args:
        x: Tokens, `[R, N, D]`.
        mask: Valid tokens, bool `[R, N]`.
        weight: Nonnegative weights, float `[R, N]`. NaN counts as 0.
        count: Number of tokens to select, long `[R]`.
        max_count: Maximum of `count`.
        weigh_first: Apply weights to the first pick too.

    Returns:
        Selected tokens, bool `[R, N]`.
    """

    def select_rows(x: Tensor, mask: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        products = Products(normalize(x))

        def nearest_other(similarity: Tensor, segment: int, start: int) -> Tensor:
            others = similarity.masked_fill(~mask[segment], -torch.inf)
            others.diagonal(start).fill_(-torch.inf)
            return others.amax(1)

        # The only token of a row has distance 2, the maximum.
        distance, row_of = 1 - products.reduce_rows(nearest_other).clamp(min=-1), PickedRows(products)
        picks = Picks(mask)
        for step in range(max_count):
            score = picks.mask_taken(distance * weight if step or weigh_first else distance)
            new = 1 - row_of(picks.take_best(score), score)
            distance = new if step == 0 else torch.minimum(distance, new)
        return picks.first_picks(count)

    weight = weight.float().nan_to_num(nan=0.0)
    return map_rows(select_rows, x.shape[1] ** 2, x, mask, weight, count)


def facility_location(x: Tensor, mask: Tensor, weight: Tensor, count: Tensor, max_count: int) -> Tensor:
    """Greedily select the tokens that maximize a weighted facility location objective.

    The objective is the sum over tokens of weight times the largest cosine (at least 0) to a selected token.

    Args:
        x: Tokens, `[R, N, D]`.
        mask: Valid tokens, bool `[R, N]`.
        weight: Nonnegative weights, float `[R, N]`. NaN counts as 0.
        count: Number of tokens to select, long `[R]`.
        max_count: Maximum of `count`.

    Returns:
        Selected tokens, bool `[R, N]`.
    """

    def select_rows(x: Tensor, mask: Tensor, weight: Tensor, count: Tensor) -> Tensor:
        return greedy_cover([Relation(Products(normalize(x)), torch.mul, weight)], mask, count, max_count)

    weight = weight.float().nan_to_num(nan=0.0).masked_fill(~mask, 0)
    return map_rows(select_rows, 2 * x.shape[1] ** 2, x, mask, weight, count)


def find_roots(parent: Tensor, steps: int) -> Tensor:
    """Return the last ancestor of each token, long `[R, N]`.

    Args:
        parent: Index of each token's parent, long `[R, N]`. A root is its own parent.
        steps: At least the length of the longest chain.

    Examples:
        >>> find_roots(torch.tensor([[0, 0, 1, 3]]), 2).tolist()
        [[0, 0, 0, 3]]
    """
    for _ in range(max(1, steps).bit_length()):
        parent = parent.gather(1, parent)
    return parent


def map_rows(function: Callable[..., Tensor], entries: int, *tensors: Tensor) -> Tensor:
    """Apply `function` to a few rows of `tensors` at a time.

    `entries` is the size of the matrix that each row needs.
    """
    blocks = list(split_rows(len(tensors[0]), entries))
    if len(blocks) == 1:
        return function(*tensors)
    return torch.cat([function(*(tensor[rows] for tensor in tensors)) for rows in blocks])


def connected_components(graph_or_vectors: Tensor, threshold: float | None = None) -> Tensor:
    """Return the lowest node index of each node's connected component, long `[..., n]`. Synchronizes with the device.

    Args:
        graph_or_vectors: Symmetric adjacency, bool `[..., n, n]`. With a threshold, unit vectors, float `[n, D]`.
        threshold: Connect vectors with a larger cosine. Cosines are computed in blocks of rows.

    Examples:
        >>> connected_components(torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 1]]).bool()).tolist()
        [0, 1, 0]
    """
    count = graph_or_vectors.shape[-1] if threshold is None else len(graph_or_vectors)
    num_nodes = graph_or_vectors[..., 0].numel() if threshold is None else count
    label = torch.arange(num_nodes, device=graph_or_vectors.device)
    if threshold is None:
        graph, first, second = graph_or_vectors.reshape(-1, count, count).triu(1).nonzero().unbind(1)
        label = _merge_components(label, graph * count + first, graph * count + second)
        return (label % max(1, count)).view(graph_or_vectors.shape[:-1])
    for similarity, row, column in (
        _iter_cosine_blocks(graph_or_vectors) if threshold < 1 else ()
    ):  # cosines are at most 1
        new = (similarity > threshold) & (label[row].unsqueeze(1) != label[column])
        first, second = new.nonzero().unbind(1)
        label = _merge_components(label, label[row][first], label[column][second])
    return label


def _iter_cosine_blocks(vectors: Tensor) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield cosines of unit vectors `[n, D]` in blocks of rows, with the slices of rows and columns of each block.

    Cosines are symmetric, so a block omits the columns before its rows, but has at least `_MIN_COLUMNS` columns.
    """
    step = max(MIN_ROWS, _MAX_ELEMENTS // max(1, len(vectors)))
    for start in range(0, len(vectors), step):
        first_column = max(0, min(start, len(vectors) - _MIN_COLUMNS))
        yield (
            vectors[start : start + step] @ vectors[first_column:].T,
            slice(start, start + step),
            slice(first_column, None),
        )


class SimilarPairs:
    """Similar pairs of tokens, found once and reused for connected components at several thresholds.

    Only a few vectors are new at each threshold (mean vectors of groups), and only these are compared again.
    Synchronizes with the device. Pairs are stored if their cosine exceeds `least`. A sample of about `_SAMPLED` tokens
    sets `least` such that about `_PAIRS` pairs per token are stored.

    Args:
        unit: Unit vectors of the tokens, float `[N, D]`.
    """

    def __init__(self, unit: Tensor) -> None:
        self._unit, count = unit, len(unit)
        sampled = (unit[:: max(1, count // _SAMPLED)] @ unit.T).flatten()
        share = min(1.0, 2 * _PAIRS / max(1, count))
        self.least = float(sampled.kthvalue(max(1, int((1 - share) * len(sampled)))).values) if share < 1 else -2.0

    def components(self, vectors: Tensor, token: Tensor, threshold: float) -> Tensor:
        """Return `connected_components(vectors, threshold)`.

        Args:
            vectors: Unit vectors, float `[n, D]`.
            token: Token index of each vector, long `[n]`; -1 for a vector that is not a single token.
            threshold: Connect vectors with a larger cosine.
        """
        mixed = (token < 0).nonzero().flatten()
        if 2 * len(mixed) > len(vectors) or threshold < self.least or threshold >= 1 or threshold < self._pairs[0]:
            return connected_components(vectors, threshold)
        _, first, second, similarity = self._pairs
        vector_index = torch.full((len(self._unit) + 1,), -1, dtype=torch.long, device=vectors.device)
        vector_index[token] = torch.arange(len(vectors), device=vectors.device)
        first, second = vector_index[first], vector_index[second]
        known = (similarity > threshold) & (first >= 0) & (second >= 0)
        label = _merge_components(torch.arange(len(vectors), device=vectors.device), first[known], second[known])
        for rows in mixed.split(max(MIN_ROWS, _MAX_ELEMENTS // max(1, len(vectors)))):
            row, second = (Products(vectors[None]).rows(0, rows) > threshold).nonzero().unbind(1)
            label = _merge_components(label, label[rows[row]], label[second])
        return label

    @cached_property
    def _pairs(self) -> tuple[float, Tensor, Tensor, Tensor]:
        """Smallest stored cosine; first token, second token and cosine of each pair."""
        threshold, pairs, num_pairs = self.least, [], 0
        for similarity, row, column in _iter_cosine_blocks(self._unit):
            first, second = (similarity > threshold).nonzero().unbind(1)
            upper = first + row.start < second + column.start
            first, second = first[upper], second[upper]
            pairs.append((first + row.start, second + column.start, similarity[first, second]))
            num_pairs += len(first)
            if num_pairs > 4 * _PAIRS * len(self._unit):  # the sample underestimated the number of pairs
                first, second, similarity = (torch.cat(parts) for parts in zip(*pairs, strict=True))
                threshold = float(similarity.median())
                above = similarity > threshold
                pairs = [(first[above], second[above], similarity[above])]
                num_pairs = len(pairs[0][0])
        first, second, similarity = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return threshold, first, second, similarity


def _merge_components(label: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Merge the components of nodes `first` and `second` (long `[e]`) and return the new labels, long `[n]`."""
    while len(first):
        low, high = torch.minimum(label[first], label[second]), torch.maximum(label[first], label[second])
        apart = low != high
        first, second, low, high = first[apart], second[apart], low[apart], high[apart]
        # Link each component to the lowest component that it touches, then follow the links to the roots.
        parent = torch.arange(len(label), device=label.device).scatter_reduce(0, high, low, "amin")
        while not torch.equal(parent, parent[parent]):
            parent = parent[parent]
        label = parent[label]
    return label
