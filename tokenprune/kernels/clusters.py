# SPDX-License-Identifier: Apache-2.0
"""Clusters of tokens: around peaks of density, in chains from frame to frame, and as components of a graph.

Rows are frames, or parts of videos, that are clustered each by itself; padding of a row influences nothing. Rows are
taken a few at a time where each needs a matrix of all its tokens. Similarities are cosines in float32, and a vector of
zeros, or with NaN in it, is similar to nothing. Plain PyTorch; nothing here asks the device but `components`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tokenprune.kernels.compact import gather_tokens, partition
from tokenprune.kernels.temporal import _unit as unit
from tokenprune.kernels.temporal import density_peaks

_NEIGHBOURS = 7  # of a token that tell how dense it is there
_AT_ONCE = 2**24  # entries of matrices in memory at a time


def in_parts(rows: int, entries: int) -> Iterator[slice]:
    """Yield slices of `rows` rows, of which each needs a matrix of so many entries."""
    step = max(1, _AT_ONCE // max(1, entries))
    return (slice(start, start + step) for start in range(0, rows, step))


def peaks_and_members(x: Tensor, mask: Tensor, number: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Cluster tokens around peaks of density (DPC-KNN): bool `[R, N]`, the centres, and long `[R, N]`, for each token
    the centre that is nearest; a centre is its own, and -1 stands for padding and where a row has no centre.

    x: `[R, N, D]`; mask: bool `[R, N]`; number: long `[R]`, how many centres, at most `most`. The density counts as
    many neighbours as there are centres, at most 7.
    """
    peaks = torch.zeros_like(mask)
    for rows in in_parts(len(x), x.shape[1] ** 2):
        peaks[rows] = density_peaks(x[rows], mask[rows], number[rows], _NEIGHBOURS, most, capped=True)
    return peaks, nearest(x, mask, peaks, most)


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
        distance = torch.cdist(x[rows], gather_tokens(x[rows], place[rows], 1), compute_mode=_EXACT)
        distance = distance.masked_fill(~allowed[rows].unsqueeze(1), torch.inf)
        found[rows] = place[rows].gather(1, distance.min(2).indices)
    found = torch.where(centres, torch.arange(mask.shape[1], device=mask.device), found)
    return found.masked_fill(~mask | ~centres.any(1, keepdim=True), -1)


_EXACT = "donot_use_mm_for_euclid_dist"


def farthest_weighted(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor, most: int) -> Tensor:
    """bool `[R, N]`: take the token whose nearest other is farthest away, then again and again the one farthest from
    all taken, by 1 - cosine times the token's own weight (FlashVID); with equal weights what DivPrune takes.

    x: `[R, N, D]`; mask: bool `[R, N]`; weight: float `[R, N]`, at least 0, NaN is 0; number: long `[R]`, at most
    `most`. Of equal ones the lower index.
    """

    def of(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        alike = unit(x) @ unit(x).transpose(1, 2)
        others = alike.masked_fill(~mask.unsqueeze(1), -torch.inf)
        others.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        distance = 1 - others.amax(2).clamp(min=-1)  # a token that has no other is as far as can be
        barred, rows = ~mask, torch.arange(len(x), device=x.device)
        for step in range(most):
            pick = _first_largest((distance * weight).masked_fill(barred, -torch.inf))
            barred[rows, pick] = barred[rows, pick] | (step < number)
            new = 1 - alike[rows, pick]
            distance = new if step == 0 else torch.minimum(distance, new)
        return barred & mask

    weight = weight.float().nan_to_num(nan=0.0)
    return _by_rows(of, x.shape[1] ** 2, x, mask, weight, number)


def covering(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor, most: int) -> Tensor:
    """bool `[R, N]`: again and again the token that adds most to how well all are covered, the sum over tokens of
    their weight times the largest cosine, at least 0, to one that is taken (a facility location, taken greedily).

    x: `[R, N, D]`; mask: bool `[R, N]`; weight: float `[R, N]`, at least 0, NaN is 0; number: long `[R]`, at most
    `most`. Of equal ones the lower index.
    """

    def of(x: Tensor, mask: Tensor, weight: Tensor, number: Tensor) -> Tensor:
        alike = (unit(x) @ unit(x).transpose(1, 2)).clamp(min=0)
        covered, barred = torch.zeros_like(weight), ~mask
        rows = torch.arange(len(x), device=x.device)
        for step in range(most):
            gain = (weight.unsqueeze(2) * (alike - covered.unsqueeze(2)).clamp(min=0)).sum(1)
            pick = _first_largest(gain.masked_fill(barred, -torch.inf))
            barred[rows, pick] = barred[rows, pick] | (step < number)
            covered = torch.where((step < number).unsqueeze(1), torch.maximum(covered, alike[rows, pick]), covered)
        return barred & mask

    weight = weight.float().nan_to_num(nan=0.0).masked_fill(~mask, 0)
    return _by_rows(of, 2 * x.shape[1] ** 2, x, mask, weight, number)


def roots(parent: Tensor, steps: int) -> Tensor:
    """long `[R, N]`: where the chain of parents of each token ends. parent: long `[R, N]`, itself where it ends; steps:
    at least the length of the longest chain."""
    for _ in range(max(1, steps).bit_length()):
        parent = parent.gather(1, parent)
    return parent


def _first_largest(score: Tensor) -> Tensor:
    """long `[R]`: the first of the largest entries of each row; argmax may name any of equal ones."""
    return (score == score.amax(1, keepdim=True)).to(torch.uint8).argmax(1)


def _by_rows(of: Callable[..., Tensor], entries: int, *given: Tensor) -> Tensor:
    parts = [of(*(one[rows] for one in given)) for rows in in_parts(len(given[0]), entries)]
    return torch.cat(parts)
