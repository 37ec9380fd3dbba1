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


@dataclass(frozen=True)
class Merge:
    """A merge of B rows of n tokens into m, in each row r = n - m sources join r (not necessarily different) targets.

    keep:   long `[B, m]`, the tokens that stay, in the order of the output.
    source: long `[B, r]`, the tokens that leave.
    target: long `[B, r]`, the place in the output of the token that each source joins.
    """

    keep: Tensor
    source: Tensor
    target: Tensor

    @cached_property
    def assign(self) -> Tensor:
        """long `[B, n]`: for each token its place in the output."""
        rows, count = self.keep.shape[0], self.keep.shape[1] + self.source.shape[1]
        places = torch.arange(self.keep.shape[1], device=self.keep.device).expand_as(self.keep)
        return self.keep.new_empty(rows, count).scatter(1, self.keep, places).scatter(1, self.source, self.target)

    def sum(self, x: Tensor) -> Tensor:
        """`[B, n]` -> `[B, m]`: each token of the output is the sum of its members."""
        return x.gather(1, self.keep).scatter_add(1, self.target, x.gather(1, self.source))

    def mean(self, x: Tensor, size: Tensor) -> Tensor:
        """`[B, n, D]` -> `[B, m, D]`: means weighted by `size` `[B, n]`, in float32; what nothing joins is copied."""
        keep, source, target = (index.unsqueeze(-1).expand(-1, -1, x.shape[-1]) for index in self._indices)
        stays, leaves = x.gather(1, keep), x.gather(1, source)
        total = self.sum(size)
        mass = stays.float() * size.gather(1, self.keep).unsqueeze(-1)
        mass = mass.scatter_add(1, target, leaves.float() * size.gather(1, self.source).unsqueeze(-1))
        mean = (mass / total.unsqueeze(-1)).to(x.dtype)
        joined = torch.zeros_like(total, dtype=torch.bool).scatter(1, self.target, True)
        return torch.where(joined.unsqueeze(-1), mean, stays)

    def unmerge(self, x: Tensor) -> Tensor:
        """`[B, m, D]` -> `[B, n, D]`: every token gets the value of the token it became part of."""
        return x.gather(1, self.assign.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    @property
    def _indices(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keep, self.source, self.target


def most(count: int, protected: int = 0) -> int:
    """How many of `count` tokens one bipartite step can merge at most."""
    return max(0, (count - protected) // 2)


def best_partners(metric: Tensor, protected: int = 0) -> tuple[Tensor, Tensor]:
    """Find for each token at an even place (set A) the most similar one at an odd place (set B), by cosine in float32.

    metric: `[B, n, D]`. protected: the first tokens (class, registers), which are neither sources nor targets.
    Returns float `[B, ceil(n/2)]` similarities, -inf for a protected token, and long partners, counted in B. Ties go to
    the lower place; a zero or non-finite vector is similar to nothing.
    """
    unit = functional.normalize(metric.float(), dim=-1)
    scores = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).nan_to_num(nan=-2.0, posinf=-2.0, neginf=-2.0)
    scores[:, : (protected + 1) // 2] = -torch.inf
    scores[:, :, : protected // 2] = -torch.inf
    best = scores.amax(dim=2)
    # argmax promises no order among equals.
    places = torch.arange(scores.shape[2], device=scores.device)
    partner = torch.where(scores == best.unsqueeze(-1), places, scores.shape[2]).amin(dim=2)
    return best, partner.clamp(max=scores.shape[2] - 1)


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
    return Merge(keep, 2 * source, target)
