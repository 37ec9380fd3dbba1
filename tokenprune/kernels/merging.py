# SPDX-License-Identifier: Apache-2.0
"""Bipartite soft matching: which tokens join which, decided once and applied to features, sizes and provenance alike.

Written from the paper (Bolya et al., "Token Merging: Your ViT But Faster", arXiv 2210.09461, section 3 and appendix D).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.join import join
from tokenprune.kernels.match import best_match
from tokenprune.kernels.pairing import as_sources, pairing
from tokenprune.kernels.transfer import to_device

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Merge:
    """A merge of B rows of n tokens into m: in each row, sources join (not necessarily different) targets and are gone.

    keep:   long `[B, m]`, the tokens that stay, in the order of the output.
    source: long `[B, r]`, the tokens that leave.
    target: long `[B, r]`, the place in the output of the token that each source joins.

    Rows may differ in how many tokens stay and leave. Then `left` has the number that stays in each row and `gone`
    (long `[B]`) the number that leaves; what stands behind these in `keep`, `source` and `target` is padding, of any
    value. The output's padding is after its tokens, and has the size 0. count: n.

    drops: whether what neither stays nor is a source is dropped; else there is no such token.
    """

    keep: Tensor
    source: Tensor
    target: Tensor
    num_tokens: int
    num_kept: list[int] | None = None
    num_merged: Tensor | None = None
    is_drop: bool = False

    @staticmethod
    def from_kept(stays: Tensor, left: list[int]) -> Merge:
        """Return what drops all but the tokens in `stays`, bool `[B, n]`; these keep their order. left: how many stay
        in each row."""
        keep = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, : max(left)]
        nobody = keep[:, :0]
        return Merge(keep, nobody, nobody, stays.shape[1], left, is_drop=True)

    @cached_property
    def assign(self) -> Tensor:
        """long `[B, n]`: for each token its place in the output (of padding: any), -1 where it is dropped."""
        rows, width = self.keep.shape
        places = torch.arange(width, device=self.keep.device).expand_as(self.keep)
        if self.is_drop:
            real = places if self._padding is None else places.masked_fill(self._padding, -1)
            return self.keep.new_full((rows, self.num_tokens), -1).scatter(1, self.keep, real)
        source, target = self._moves
        # One entry more than asked for takes what goes nowhere: no boolean indexing, so no device sync.
        place = self.keep.new_zeros(rows * self.num_tokens + 1).index_copy_(0, self._stays, places.flatten())
        if self.num_merged is not None:
            source = source.masked_fill(target == rows * width, rows * self.num_tokens)
        return place.index_copy_(0, source, self.target.flatten())[:-1].view(rows, self.num_tokens)

    def sum(self, x: Tensor) -> Tensor:
        """`[B, n]` -> `[B, m]`: each token of the output is the sum of its members; padding is 0."""
        source, target = self._moves
        stays = x.gather(1, self.keep)
        if self._padding is not None:
            stays = stays.masked_fill(self._padding, 0)
        total = stays.flatten()
        if self.num_merged is not None:
            total = torch.cat([total, total.new_zeros(1)])
        return total.index_add(0, target, x.flatten()[source])[: stays.numel()].view_as(stays)

    def mean(self, x: Tensor, size: Tensor | None) -> Tensor:
        """`[B, n, D]` -> `[B, m, D]`: means weighted by `size` `[B, n]`, in float32; what nothing joins is copied.
        size: None where nothing joins anything."""
        if size is None:
            return x.flatten(0, 1)[self._stays].view(*self.keep.shape, -1)
        weight, (source, target) = size.flatten(), self._moves
        mean = join(x.flatten(0, 1), self._stays, weight[self._stays], source, target, weight[source])
        return mean.view(*self.keep.shape, -1)

    def unmerge(self, x: Tensor) -> Tensor:
        """`[B, m, D]` -> `[B, n, D]`: every token gets the value of the token it became part of."""
        return x.gather(1, self.assign.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    @cached_property
    def _stays(self) -> Tensor:
        """`keep`, in rows laid end to end."""
        return _end_to_end(self.keep, self.num_tokens)

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor]:
        """`source` and `target` in rows laid end to end; the target of padding is after the last row."""
        source, target = _end_to_end(self.source, self.num_tokens), _end_to_end(self.target, self.keep.shape[1])
        if self.num_merged is None:
            return source, target
        real = (torch.arange(self.source.shape[1], device=source.device) < self.num_merged[:, None]).flatten()
        return source, torch.where(real, target, self.keep.numel())

    @cached_property
    def _padding(self) -> Tensor | None:
        """bool `[B, m]`: what no token of the output is; None if there is none."""
        width = self.keep.shape[1]
        if self.num_kept is None or min(self.num_kept) == width:
            return None
        device = self.keep.device
        return torch.arange(width, device=device) >= to_device(self.num_kept, device)[:, None]


def _end_to_end(index: Tensor, count: int) -> Tensor:
    """long `[B, k]` of places in rows of `count` -> long `[B * k]`."""
    if len(index) > 1:
        index = index.add(torch.arange(len(index), device=index.device)[:, None], alpha=count)
    return index.flatten()


def max_merges(count: int, protected: int = 0) -> int:
    """Return the most tokens of `count` that one bipartite step can merge."""
    return max(0, (count - protected) // 2)


def best_partners(metric: Tensor, protected: int = 0, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Find for each token at an even place (set A) the most similar one at an odd place (set B), by cosine in float32.

    metric: `[B, n, D]`. protected: the first tokens (class, registers), which are neither sources nor targets. counts:
    the real tokens of each row; what is behind them is padding, and neither either. Returns float `[B, ceil(n/2)]`
    similarities, in steps of `TIE`, -inf for what is no source, and long partners, counted in B. Ties go to the lower
    place; a zero or non-finite vector is similar to nothing.
    """
    real = None if counts is None else to_device(counts, metric.device)
    allowed = None
    if real is not None or protected > 1:  # a single protected token is in A, so that all of B can be found
        place = 2 * torch.arange(metric.shape[1] // 2, device=metric.device).expand(len(metric), -1) + 1
        allowed = place >= protected
        if real is not None:
            allowed = allowed & (place < real[:, None])
    return as_sources(*best_match(metric[:, ::2], metric[:, 1::2], allowed), protected, real)


def bipartite_match(metric: Tensor, r: int, protected: int = 0) -> Merge | None:
    """Merge the `r` most similar pairs of one token at an even and one at an odd place; None if there is nothing to do.

    metric: `[B, n, D]`. r is capped at half of the tokens that are not protected. The output holds the protected
    tokens, then what is left of A, then B. That order mixes the tokens on purpose, so that the next step compares
    others; what is left of A is in order of place where there is a protected token, else of similarity.
    """
    count = metric.shape[1]
    r = min(r, max_merges(count, protected))
    if r <= 0:
        return None
    best, partner = best_partners(metric, protected)
    rows = len(metric)
    keep, source, target = pairing(best, partner, [r] * rows, [count] * rows, protected, protected > 0)
    return Merge(keep, source, target, count)


def threshold_match(
    metric: Tensor,
    counts: list[int] | None,
    *,
    threshold: float,
    protected: int = 0,
    limit: int | None = None,
    floor: int = 0,
    ceiling: int | None = None,
) -> Merge | None:
    """Merge the pairs more similar than `threshold`, in each row at most half of its tokens and at most `limit`.

    metric: `[B, n, D]`. counts: the real tokens of each row, None if all are. floor, ceiling: the fewest and the most
    tokens that may be left in a row; where more would be, the best pairs below the threshold merge too. None if no row
    merges anything.
    """
    best, partner = best_partners(metric, protected, counts)
    counts = counts or [metric.shape[1]] * len(metric)
    merged = []
    for count, above in zip(counts, (best > threshold).sum(dim=1).tolist(), strict=True):
        cap = max_merges(count, protected) if limit is None else min(limit, max_merges(count, protected))
        least = 0 if ceiling is None else count - ceiling
        merged.append(min(max(above, least), cap, max(0, count - floor)))
    return ragged_merge(best, partner, merged, protected, counts)


def ragged_merge(best: Tensor, partner: Tensor, r: list[int], protected: int, counts: list[int]) -> Merge | None:
    """Merge in each row its r best pairs; None if no row has any.

    best, partner: of `best_partners`. counts: the real tokens of each row. The output holds the protected tokens, then
    what is left of A, then B, each in order of place, then padding; a row that merges nothing stays as it is.
    """
    if not any(r):
        return None
    left = [count - gone for count, gone in zip(counts, r, strict=True)]
    ragged = min(r) < max(r)
    on_device = None
    if ragged or min(counts) < max(counts):
        on_device = to_device(r, best.device), to_device(counts, best.device)
    keep, source, target = pairing(best, partner, r, counts, protected, on_device=on_device)
    return Merge(keep, source, target, max(counts), left, on_device[0] if on_device and ragged else None)
