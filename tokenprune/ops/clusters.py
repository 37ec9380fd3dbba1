# SPDX-License-Identifier: Apache-2.0
"""Clusters of tokens: around peaks of density, in chains from frame to frame, and as components of a graph.

Rows are frames, or parts of videos, that are clustered each by itself; padding of a row influences nothing. Rows are
taken a few at a time where each needs a matrix of all its tokens. Similarities are cosines in float32, and a vector of
zeros, or with NaN in it, is similar to nothing. Plain PyTorch; nothing here asks the device but `components`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.coverage import cover
from tokenprune.kernels.pairs import LEAST, PickedRows, Products, Relation, distances, unit
from tokenprune.kernels.picks import Picks
from tokenprune.ops.temporal import density_peaks

if TYPE_CHECKING:
    from torch import Tensor

_NEIGHBOURS = 7  # of a token that tell how dense it is there
_AT_ONCE = 2**24  # entries of matrices in memory at a time
_BROAD = 256  # columns of a product at least: with few a BLAS rounds otherwise


def in_parts(rows: int, entries: int) -> Iterator[slice]:
    """Yield slices of `rows` rows, of which each needs a matrix of so many entries."""
    step = max(1, _AT_ONCE // max(1, entries))
    return (slice(start, start + step) for start in range(0, rows, step))


def peaks_and_members(x: Tensor, mask: Tensor, number: Tensor, most: int, capped: bool = True) -> tuple[Tensor, Tensor]:
    """Cluster tokens around peaks of density (DPC-KNN): bool `[R, N]`, the centres, and long `[R, N]`, for each token
    the centre that is nearest; a centre is its own, and -1 stands for padding and where a row has no centre.

    x: `[R, N, D]`; mask: bool `[R, N]`; number: long `[R]`, how many centres, at most `most`. The density counts 7
    neighbours, and, if `capped`, no more than there are centres.
    """
    centres = peaks(x, mask, number, most, capped=capped)
    return centres, nearest(x, mask, centres, most)


def peaks(
    x: Tensor, mask: Tensor, number: Tensor, most: int, neighbours: int = _NEIGHBOURS, capped: bool = True
) -> Tensor:
    """bool `[R, N]`: see `density_peaks`; a few rows at a time."""
    parts = in_parts(len(x), x.shape[1] ** 2)
    return torch.cat([density_peaks(x[r], mask[r], number[r], neighbours, most, capped) for r in parts])


def nearest(x: Tensor, mask: Tensor, centres: Tensor, most: int) -> Tensor:
    """long `[R, N]`: for each token the centre at the least Euclidean distance, of equal ones the first; a centre is
    its own, and -1 stands for padding and where a row has none.

    x: `[R, N, D]`; mask, centres: bool `[R, N]`; most: at least the largest number of centres.
    """
    x = x.float().masked_fill(~x.isfinite().all(-1, keepdim=True), 0)
    place = partition(centres)[:, : max(1, most)]
    allowed = centres.gather(1, place)
    found = torch.empty_like(mask, dtype=torch.long)
    for rows in in_parts(len(x), x.shape[1] * place.shape[1]):
        distance = distances(x[rows], gather_tokens(x[rows], place[rows], 1))
        distance = distance.masked_fill(~allowed[rows].unsqueeze(1), torch.inf)
        found[rows] = place[rows].gather(1, distance.min(2).indices)
    found = torch.where(centres, torch.arange(mask.shape[1], device=mask.device), found)
    return found.masked_fill(~mask | ~centres.any(1, keepdim=True), -1)


def farthest_weighted(
    x: Tensor, mask: Tensor, weight: Tensor, number: Tensor, most: int, weigh_first: bool = True
) -> Tensor:
    """bool `[R, N]`: take the token whose nearest other is farthest away, then again and again the one farthest from
    all taken, by 1 - cosine times the token's own weight (FlashVID); with equal weights what DivPrune takes.

    x: `[R, N, D]`; mask: bool `[R, N]`; weight: float `[R, N]`, at least 0, NaN is 0; number: long `[R]`, at most
    `most`. weigh_first: False takes the first one without its weight. Of equal ones the lower index.
    """

    def of(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        products = Products(unit(x))

        def nearest_other(alike: Tensor, segment: int, start: int) -> Tensor:
            others = alike.masked_fill(~mask[segment], -torch.inf)
            others.diagonal(start).fill_(-torch.inf)
            return others.amax(1)

        # A token that has no other is as far as can be.
        distance, row_of = 1 - products.of_rows(nearest_other).clamp(min=-1), PickedRows(products)
        picks = Picks(mask)
        for step in range(most):
            score = picks.among_left(distance * weight if step or weigh_first else distance)
            new = 1 - row_of(picks.take_best(score), score)
            distance = new if step == 0 else torch.minimum(distance, new)
        return picks.first(number)

    weight = weight.float().nan_to_num(nan=0.0)
    return by_rows(of, x.shape[1] ** 2, x, mask, weight, number)


def covering(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor, most: int) -> Tensor:
    """bool `[R, N]`: again and again the token that adds most to how well all are covered, the sum over tokens of
    their weight times the largest cosine, at least 0, to one that is taken (a facility location, taken greedily).

    x: `[R, N, D]`; mask: bool `[R, N]`; weight: float `[R, N]`, at least 0, NaN is 0; number: long `[R]`, at most
    `most`. Of equal ones the lower index.
    """

    def of(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        return cover([Relation(Products(unit(x)), torch.mul, weight)], mask, number, most)

    weight = weight.float().nan_to_num(nan=0.0).masked_fill(~mask, 0)
    return by_rows(of, 2 * x.shape[1] ** 2, x, mask, weight, number)


def roots(parent: Tensor, steps: int) -> Tensor:
    """long `[R, N]`: where the chain of parents of each token ends. parent: long `[R, N]`, itself where it ends; steps:
    at least the length of the longest chain."""
    for _ in range(max(1, steps).bit_length()):
        parent = parent.gather(1, parent)
    return parent


def by_rows(of: Callable[..., Tensor], entries: int, *given: Tensor) -> Tensor:
    """Return `of(*given)`, computed a few rows at a time; entries: of the matrix that each row needs."""
    parts = [of(*(one[rows] for one in given)) for rows in in_parts(len(given[0]), entries)]
    return torch.cat(parts)


def components(near: Tensor, threshold: float | None = None) -> Tensor:
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
    step = max(LEAST, _AT_ONCE // max(1, count)) if threshold < 1 else max(1, count)
    for start in range(0, count if threshold < 1 else 0, step):  # cosines are at most 1
        row, left = label[start : start + step], max(0, min(start, count - _BROAD))
        new = (near[start : start + step] @ near[left:].T > threshold) & (row.unsqueeze(1) != label[left:])
        first, second = new.nonzero().unbind(1)
        label = _united(label, label[first + start], label[second + left])
    return label


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
