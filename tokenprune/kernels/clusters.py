# SPDX-License-Identifier: Apache-2.0
"""Clusters of tokens: around peaks of density, in chains from frame to frame, and as components of a graph.

Rows are frames, or parts of videos, that are clustered each by itself; padding of a row influences nothing. Rows are
taken a few at a time where each needs a matrix of all its tokens. Similarities are cosines in float32, and a vector of
zeros, or with NaN in it, is similar to nothing. Plain PyTorch; nothing here asks the device but `components`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.coverage import greedy_cover
from tokenprune.kernels.pairs import MIN_ROWS, PickedRows, Products, Relation, distances, is_finite, normalize
from tokenprune.kernels.picks import Picks
from tokenprune.kernels.temporal import density_peaks

if TYPE_CHECKING:
    from torch import Tensor

_NEIGHBOURS = 7  # of a token that tell how dense it is there
_AT_ONCE = 2**24  # entries of matrices in memory at a time
_BROAD = 256  # columns of a product at least: with few a BLAS rounds otherwise
_PAIRS, _ASKED = 32, 64  # pairs that are known of a token, about; tokens that tell from which cosine on


def split_rows(rows: int, entries: int) -> Iterator[slice]:
    """Yield slices of `rows` rows, of which each needs a matrix of so many entries."""
    step = max(1, _AT_ONCE // max(1, entries))
    return (slice(start, start + step) for start in range(0, rows, step))


def cluster_density_peaks(
    x: Tensor, mask: Tensor, number: Tensor, most: int, capped: bool = True
) -> tuple[Tensor, Tensor]:
    """Cluster tokens around peaks of density (DPC-KNN): bool `[R, N]`, the centres, and long `[R, N]`, for each token
    the centre that is nearest; a centre is its own, and -1 stands for padding and where a row has no centre.

    x: `[R, N, D]`; mask: bool `[R, N]`; number: long `[R]`, how many centres, at most `most`. The density counts 7
    neighbours, and, if `capped`, no more than there are centres.
    """
    centres = find_density_peaks(x, mask, number, most, capped=capped)
    return centres, assign_to_centres(x, mask, centres, most)


def find_density_peaks(
    x: Tensor, mask: Tensor, number: Tensor, most: int, neighbours: int = _NEIGHBOURS, capped: bool = True
) -> Tensor:
    """bool `[R, N]`: see `density_peaks`; a few rows at a time."""

    def of(x: Tensor, mask: Tensor, number: Tensor) -> Tensor:
        return density_peaks(x, mask, number, neighbours, most, capped)

    return map_rows(of, x.shape[1] ** 2, x, mask, number)


def assign_to_centres(x: Tensor, mask: Tensor, centres: Tensor, most: int) -> Tensor:
    """long `[R, N]`: for each token the centre at the least Euclidean distance, of equal ones the first; a centre is
    its own, and -1 stands for padding and where a row has none.

    x: `[R, N, D]`; mask, centres: bool `[R, N]`; most: at least the largest number of centres.
    """
    x = x.float().masked_fill(~is_finite(x).unsqueeze(-1), 0)
    place = partition(centres)[:, : max(1, most)]
    allowed = centres.gather(1, place)
    found = torch.empty_like(mask, dtype=torch.long)
    for rows in split_rows(len(x), x.shape[1] * place.shape[1]):
        distance = distances(x[rows], gather_tokens(x[rows], place[rows], 1))
        distance = distance.masked_fill(~allowed[rows].unsqueeze(1), torch.inf)
        found[rows] = place[rows].gather(1, distance.min(2).indices)
    found = torch.where(centres, torch.arange(mask.shape[1], device=mask.device), found)
    return found.masked_fill(~mask | ~centres.any(1, keepdim=True), -1)


def select_farthest_weighted(
    x: Tensor, mask: Tensor, weight: Tensor, number: Tensor, most: int, weigh_first: bool = True
) -> Tensor:
    """bool `[R, N]`: take the token whose nearest other is farthest away, then again and again the one farthest from
    all taken, by 1 - cosine times the token's own weight (FlashVID); with equal weights what DivPrune takes.

    x: `[R, N, D]`; mask: bool `[R, N]`; weight: float `[R, N]`, at least 0, NaN is 0; number: long `[R]`, at most
    `most`. weigh_first: False takes the first one without its weight. Of equal ones the lower index.
    """

    def of(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        products = Products(normalize(x))

        def nearest_other(alike: Tensor, segment: int, start: int) -> Tensor:
            others = alike.masked_fill(~mask[segment], -torch.inf)
            others.diagonal(start).fill_(-torch.inf)
            return others.amax(1)

        # A token that has no other is as far as can be.
        distance, row_of = 1 - products.reduce_rows(nearest_other).clamp(min=-1), PickedRows(products)
        picks = Picks(mask)
        for step in range(most):
            score = picks.mask_taken(distance * weight if step or weigh_first else distance)
            new = 1 - row_of(picks.take_best(score), score)
            distance = new if step == 0 else torch.minimum(distance, new)
        return picks.first_picks(number)

    weight = weight.float().nan_to_num(nan=0.0)
    return map_rows(of, x.shape[1] ** 2, x, mask, weight, number)


def facility_location(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor, most: int) -> Tensor:
    """bool `[R, N]`: again and again the token that adds most to how well all are covered, the sum over tokens of
    their weight times the largest cosine, at least 0, to one that is taken (a facility location, taken greedily).

    x: `[R, N, D]`; mask: bool `[R, N]`; weight: float `[R, N]`, at least 0, NaN is 0; number: long `[R]`, at most
    `most`. Of equal ones the lower index.
    """

    def of(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        return greedy_cover([Relation(Products(normalize(x)), torch.mul, weight)], mask, number, most)

    weight = weight.float().nan_to_num(nan=0.0).masked_fill(~mask, 0)
    return map_rows(of, 2 * x.shape[1] ** 2, x, mask, weight, number)


def find_roots(parent: Tensor, steps: int) -> Tensor:
    """long `[R, N]`: where the chain of parents of each token ends. parent: long `[R, N]`, itself where it ends; steps:
    at least the length of the longest chain."""
    for _ in range(max(1, steps).bit_length()):
        parent = parent.gather(1, parent)
    return parent


def map_rows(of: Callable[..., Tensor], entries: int, *given: Tensor) -> Tensor:
    """Return `of(*given)`, computed a few rows at a time; entries: of the matrix that each row needs."""
    parts = [of(*(one[rows] for one in given)) for rows in split_rows(len(given[0]), entries)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def connected_components(near: Tensor, threshold: float | None = None) -> Tensor:
    """Return for each node the lowest index of its connected component, long `[..., n]`. Waits for the device.

    near: bool `[..., n, n]`, symmetric, whether two nodes are connected; or float `[n, D]`, vectors of length 1, which
    are connected where their cosine is above `threshold`, a block of rows after the other.
    """
    count = near.shape[-1] if threshold is None else len(near)
    number = near[..., 0].numel() if threshold is None else count
    label = torch.arange(number, device=near.device)
    if threshold is None:
        graph, first, second = near.reshape(-1, count, count).triu(1).nonzero().unbind(1)
        label = _united(label, graph * count + first, graph * count + second)
        return (label % max(1, count)).view(near.shape[:-1])
    for alike, row, column in _upper(near) if threshold < 1 else ():  # cosines are at most 1
        new = (alike > threshold) & (label[row].unsqueeze(1) != label[column])
        first, second = new.nonzero().unbind(1)
        label = _united(label, label[row][first], label[column][second])
    return label


def _upper(near: Tensor) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield the cosines of vectors `[n, D]` of length 1, a block of rows after the other, with its rows and columns;
    columns before the rows are left out, as far as what is left is broad."""
    step = max(MIN_ROWS, _AT_ONCE // max(1, len(near)))
    for start in range(0, len(near), step):
        left = max(0, min(start, len(near) - _BROAD))
        yield near[start : start + step] @ near[left:].T, slice(start, start + step), slice(left, None)


class SimilarPairs:
    """Pairs of tokens of high cosine, found once: components of groups, most of which are a token alone, need not
    compare all of them for each threshold. Waits for the device.

    unit: float `[N, D]`, tokens of length 1. `least`: the cosine above which pairs are known, so that they are about
    `_PAIRS` a token; a few tokens tell it beforehand.
    """

    def __init__(self, unit: Tensor) -> None:
        self._unit, count = unit, len(unit)
        some = (unit[:: max(1, count // _ASKED)] @ unit.T).flatten()
        known = min(1.0, 2 * _PAIRS / max(1, count))
        self.least = float(some.kthvalue(max(1, int((1 - known) * len(some)))).values) if known < 1 else -2.0

    def components(self, near: Tensor, token: Tensor, threshold: float) -> Tensor:
        """Return `components(near, threshold)`. token: long `[n]`, the token that each vector is, -1 for another."""
        mixed = (token < 0).nonzero().flatten()
        if 2 * len(mixed) > len(near) or threshold < self.least or threshold >= 1 or threshold < self._pairs[0]:
            return connected_components(near, threshold)
        _, first, second, alike = self._pairs
        place = torch.full((len(self._unit) + 1,), -1, dtype=torch.long, device=near.device)
        place[token] = torch.arange(len(near), device=near.device)
        first, second = place[first], place[second]
        known = (alike > threshold) & (first >= 0) & (second >= 0)
        label = _united(torch.arange(len(near), device=near.device), first[known], second[known])
        for some in mixed.split(max(MIN_ROWS, _AT_ONCE // max(1, len(near)))):
            row, second = (Products(near[None]).rows(0, some) > threshold).nonzero().unbind(1)
            label = _united(label, label[some[row]], label[second])
        return label

    @cached_property
    def _pairs(self) -> tuple[float, Tensor, Tensor, Tensor]:
        """The cosine above which pairs are known, the two of each, and its cosine."""
        least, found, number = self.least, [], 0
        for alike, row, column in _upper(self._unit):
            first, second = (alike > least).nonzero().unbind(1)
            upper = first + row.start < second + column.start
            first, second = first[upper], second[upper]
            found.append((first + row.start, second + column.start, alike[first, second]))
            number += len(first)
            if number > 4 * _PAIRS * len(self._unit):  # a sample had fewer
                first, second, alike = (torch.cat(one) for one in zip(*found, strict=True))
                least = float(alike.median())
                above = alike > least
                found = [(first[above], second[above], alike[above])]
                number = len(found[0][0])
        first, second, alike = (torch.cat(one) for one in zip(*found, strict=True))
        return least, first, second, alike


def _united(label: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Return `label` once nodes `first` and `second`, long `[e]`, are in one component. label: long `[n]`, of each node
    the lowest of its component."""
    while len(first):
        low, high = torch.minimum(label[first], label[second]), torch.maximum(label[first], label[second])
        apart = low != high
        first, second, low, high = first[apart], second[apart], low[apart], high[apart]
        # The component that a label stands for goes to the lowest one that it touches; chains of these end at one.
        parent = torch.arange(len(label), device=label.device).scatter_reduce(0, high, low, "amin")
        while not torch.equal(parent, parent[parent]):
            parent = parent[parent]
        label = parent[label]
    return label
