# SPDX-License-Identifier: Apache-2.0
"""Bipartite soft matching: which tokens join which, decided once and applied to features, sizes and provenance alike.

Written from the paper (Bolya et al., "Token Merging: Your ViT But Faster", arXiv 2210.09461, section 3 and appendix D).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from tokenprune.transfer import sent


@dataclass(frozen=True)
class Merge:
    """A merge of B rows of n tokens into m: in each row, sources join (not necessarily different) targets and are gone.

    keep:   long `[B, m]`, the tokens that stay, in the order of the output.
    source: long `[B, r]`, the tokens that leave.
    target: long `[B, r]`, the place in the output of the token that each source joins.

    Rows may differ in how many tokens stay and leave. Then `left` has the number that stays in each row and `gone`
    (long `[B]`) the number that leaves; what stands behind these in `keep`, `source` and `target` is padding, of any
    value. The output's padding is behind its tokens, and has the size 0. count: n.
    """

    keep: Tensor
    source: Tensor
    target: Tensor
    count: int
    left: list[int] | None = None
    gone: Tensor | None = None

    @cached_property
    def assign(self) -> Tensor:
        """long `[B, n]`: for each token its place in the output (of padding: any)."""
        rows, width = self.keep.shape
        places = torch.arange(width, device=self.keep.device).expand_as(self.keep)
        place = self.keep.new_zeros(rows, self.count).scatter(1, self.keep, places)
        source, target = self._moves
        return place.flatten().index_copy(0, source, target % width).view(rows, self.count)

    def sum(self, x: Tensor) -> Tensor:
        """`[B, n]` -> `[B, m]`: each token of the output is the sum of its members; padding is 0."""
        source, target = self._moves
        stays = x.gather(1, self.keep)
        if self._padding is not None:
            stays = stays.masked_fill(self._padding, 0)
        return stays.flatten().index_add(0, target, x.flatten()[source]).view_as(stays)

    def mean(self, x: Tensor, size: Tensor) -> Tensor:
        """`[B, n, D]` -> `[B, m, D]`: means weighted by `size` `[B, n]`, in float32; what nothing joins is copied."""
        # Rows laid end to end: taking whole tokens is much faster than gathering their elements.
        flat, weight, (source, target) = x.flatten(0, 1), size.flatten(), self._moves
        stays, own = flat[self._stays], weight[self._stays]
        mass = stays.float() * own[:, None]
        mass = mass.index_add(0, target, flat[source].float() * weight[source, None])
        joined = torch.zeros_like(own, dtype=torch.bool).index_fill(0, target, True)
        total = own.index_add(0, target, weight[source]).masked_fill(~joined, 1)
        mean = (mass / total[:, None]).to(x.dtype)
        return torch.where(joined[:, None], mean, stays).view(*self.keep.shape, -1)

    def unmerge(self, x: Tensor) -> Tensor:
        """`[B, m, D]` -> `[B, n, D]`: every token gets the value of the token it became part of."""
        return x.gather(1, self.assign.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    @cached_property
    def _stays(self) -> Tensor:
        """`keep`, in rows laid end to end."""
        return _end_to_end(self.keep, self.count)

    @cached_property
    def _moves(self) -> tuple[Tensor, Tensor]:
        """`source` and `target` without padding, in rows laid end to end."""
        source, target = _end_to_end(self.source, self.count), _end_to_end(self.target, self.keep.shape[1])
        if self.gone is None:
            return source, target
        real = (torch.arange(self.source.shape[1], device=source.device) < self.gone[:, None]).flatten()
        return source[real], target[real]

    @cached_property
    def _padding(self) -> Tensor | None:
        """bool `[B, m]`: what no token of the output is; None if there is none."""
        width = self.keep.shape[1]
        if self.left is None or min(self.left) == width:
            return None
        device = self.keep.device
        return torch.arange(width, device=device) >= sent(self.left, device)[:, None]


def _end_to_end(index: Tensor, count: int) -> Tensor:
    """long `[B, k]` of places in rows of `count` -> long `[B * k]`."""
    return (index + count * torch.arange(len(index), device=index.device)[:, None]).flatten()


def most(count: int, protected: int = 0) -> int:
    """How many of `count` tokens one bipartite step can merge at most."""
    return max(0, (count - protected) // 2)


def best_partners(metric: Tensor, protected: int = 0, counts: list[int] | None = None) -> tuple[Tensor, Tensor]:
    """Find for each token at an even place (set A) the most similar one at an odd place (set B), by cosine in float32.

    metric: `[B, n, D]`. protected: the first tokens (class, registers), which are neither sources nor targets. counts:
    the real tokens of each row; what is behind them is padding, and neither either. Returns float `[B, ceil(n/2)]`
    similarities, -inf for what is no source, and long partners, counted in B. Ties go to the lower place; a zero or
    non-finite vector is similar to nothing.
    """
    unit = functional.normalize(metric.float(), dim=-1)
    scores = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).nan_to_num(nan=-2.0, posinf=-2.0, neginf=-2.0)
    scores[:, : (protected + 1) // 2] = -torch.inf
    scores[:, :, : protected // 2] = -torch.inf
    if counts is not None:
        real = torch.arange(metric.shape[1], device=metric.device) < sent(counts, metric.device)[:, None]
        scores.masked_fill_(~(real[:, ::2, None] & real[:, None, 1::2]), -torch.inf)
    best, partner = scores.max(dim=2)  # of equals the first
    return best, partner


def bipartite_match(metric: Tensor, r: int, protected: int = 0) -> Merge | None:
    """Merge the `r` most similar pairs of one token at an even and one at an odd place; None if there is nothing to do.

    metric: `[B, n, D]`. r is capped at half of the tokens that are not protected. The output holds the protected
    tokens, then what is left of A, then B. That order mixes the tokens on purpose, so that the next step compares
    others; what is left of A is in order of place where there is a protected token, else of similarity.
    """
    count = metric.shape[1]
    r = min(r, most(count, protected))
    if r <= 0:
        return None
    best, partner = best_partners(metric, protected)
    order = best.argsort(dim=1, descending=True, stable=True)
    source, rest = order[:, :r], order[:, r:]
    if protected:
        rest = rest.sort(dim=1).values
    return _merge(source, rest, partner, count, protected)


def _merge(source: Tensor, rest: Tensor, partner: Tensor, count: int, protected: int) -> Merge:
    """source, rest: places in A. partner: for each of A a place in B."""
    rows, device = source.shape[0], source.device
    first, ahead = (protected + 1) // 2, protected // 2  # protected tokens in A and in B
    prefix = torch.arange(protected, device=device).expand(rows, -1)
    others = torch.arange(ahead, count // 2, device=device).expand(rows, -1)
    keep = torch.cat([prefix, 2 * rest[:, first:], 2 * others + 1], dim=1)
    target = partner.gather(1, source) - ahead + protected + rest.shape[1] - first
    return Merge(keep, 2 * source, target, count)


def threshold_match(
    metric: Tensor, counts: list[int] | None, *, threshold: float, protected: int = 0, limit: int | None = None
) -> Merge | None:
    """Merge the pairs more similar than `threshold`, in each row at most half of its tokens and at most `limit`.

    metric: `[B, n, D]`. counts: the real tokens of each row, None if all are. None if no row merges anything.
    """
    best, partner = best_partners(metric, protected, counts)
    counts = counts or [metric.shape[1]] * len(metric)
    wanted = (best > threshold).sum(dim=1).tolist()
    caps = [most(count, protected) if limit is None else min(limit, most(count, protected)) for count in counts]
    return ragged_merge(best, partner, [min(pair) for pair in zip(wanted, caps, strict=True)], protected, counts)


def ragged_merge(best: Tensor, partner: Tensor, r: list[int], protected: int, counts: list[int]) -> Merge | None:
    """Merge in each row its r best pairs; None if no row has any.

    best, partner: of `best_partners`. counts: the real tokens of each row. The output holds the protected tokens, then
    what is left of A, then B, each in order of place, then padding; a row that merges nothing stays as it is.
    """
    if not any(r):
        return None
    rows, device = len(r), best.device
    width = max(counts)
    left = [count - gone for count, gone in zip(counts, r, strict=True)]
    real, gone = sent(counts, device), sent(r, device)
    order = best.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(order.shape[1], device=device)
    leaves = torch.empty_like(order).scatter(1, order, ranks.expand_as(order)) < gone[:, None]
    # Sorted by kind: 0 protected or left of A, 1 of B, 2 gone or padding.
    kind = (torch.arange(width, device=device) % 2).repeat(rows, 1)
    kind[:, ::2] += 2 * leaves
    kind[:, :protected] = 0
    kind.masked_fill_(gone[:, None] == 0, 0)
    kind.masked_fill_(torch.arange(width, device=device) >= real[:, None], 2)
    sorted_ = kind.argsort(dim=1, stable=True)
    place = torch.empty_like(sorted_).scatter(1, sorted_, torch.arange(width, device=device).expand_as(sorted_))
    source = order[:, : max(r)]
    target = place.gather(1, 2 * partner.gather(1, source) + 1)
    return Merge(sorted_[:, : max(left)], 2 * source, target, width, left, gone if min(r) < max(r) else None)
