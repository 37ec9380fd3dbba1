# SPDX-License-Identifier: Apache-2.0
"""Selection of merged pairs in bipartite matching, and the order of the remaining tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.match import TIE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LARGEST = 2**13  # maximum number of sources per row in the kernel


def _limits(best: Tensor, *args: object, **kwargs: object) -> str | None:
    return None if best.shape[1] <= _LARGEST else f"a row has {best.shape[1]} sources, more than {_LARGEST}"


@operation(kernel="tokenprune.kernels.pairing_triton:as_sources")
def as_sources(best: Tensor, partner: Tensor, protected: int, num_valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round similarities to steps of `TIE`, and mask tokens that cannot be sources. The kernel returns equal values.

    Args:
        best: Similarities of the tokens at even indices from `best_match`, float32 `[B, ceil(n/2)]`.
        partner: Partners from `best_match`, long.
        protected: Number of leading tokens that cannot be sources.
        num_valid: Number of valid tokens per row, long `[B]`. None if all are valid.

    Returns:
        Similarities, -inf for tokens that cannot be sources; and partners, 0 for these tokens.
    """
    index = 2 * torch.arange(best.shape[1], device=best.device).expand_as(best)
    can = index >= protected
    if num_valid is not None:
        can = can & (index < num_valid[:, None])
    # Rounded to steps, so that equal vectors have similarity 1 exactly.
    best = (best / TIE).round() * TIE
    return best.masked_fill(~can, -torch.inf), partner.masked_fill(~can, 0)


@operation(kernel="tokenprune.kernels.pairing_triton:pairing", limits=_limits)
def pairing(
    best: Tensor, partner: Tensor, num_merged: Sequence[int], counts: Sequence[int], protected: int,
    by_index: bool = True, *, on_device: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Select the sources with the most similar partners in each row, and order the remaining tokens.

    The remaining tokens are the protected ones, then the rest at even indices, then odd indices, each in order of
    index. A row without merges keeps its order. Entries beyond a row's counts are padding with any valid index. Ties go
    to the lower index. The kernel returns equal indices outside of padding.

    Args:
        best: Similarities from `as_sources`.
        partner: Partners from `as_sources`.
        num_merged: Number of sources per row, at most half of its unprotected tokens.
        counts: Number of valid tokens per row.
        protected: Number of leading tokens that remain.
        by_index: Order the rest at even indices by index. False orders it by falling similarity, which requires
            `protected=0` and equal rows.
        on_device: `num_merged` and `counts` as long `[B]` on the device. Required if rows differ.

    Returns:
        Remaining tokens, long `[B, m]`; sources by falling similarity, long `[B, r]`; and the index of each source's
        target among the remaining tokens, long `[B, r]`.
    """
    if on_device is None:
        return _even(best, partner, num_merged[0], counts[0], protected, by_index)
    rows, device, width, (fewer, num_valid) = len(num_merged), best.device, max(counts), on_device
    left = [count - less for count, less in zip(counts, num_merged, strict=True)]
    order = best.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(order.shape[1], device=device)
    leaves = torch.empty_like(order).scatter(1, order, ranks.expand_as(order)) < fewer[:, None]
    # Sort by kind: 0 protected or remaining at an even index, 1 at an odd index, 2 merged or padding.
    kind = (torch.arange(width, device=device) % 2).repeat(rows, 1)
    kind[:, ::2] += 2 * leaves
    kind[:, :protected] = 0
    kind.masked_fill_(fewer[:, None] == 0, 0)
    kind.masked_fill_(torch.arange(width, device=device) >= num_valid[:, None], 2)
    sorted_ = kind.argsort(dim=1, stable=True)
    index = torch.empty_like(sorted_).scatter(1, sorted_, torch.arange(width, device=device).expand_as(sorted_))
    source = order[:, : max(num_merged)]
    target = index.gather(1, 2 * partner.gather(1, source) + 1)
    return sorted_[:, : max(left)], 2 * source, target


def _even(
    best: Tensor, partner: Tensor, num_merged: int, count: int, protected: int, by_index: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `pairing` for rows with equal counts."""
    order = best.argsort(dim=1, descending=True, stable=True)
    source, rest = order[:, :num_merged], order[:, num_merged:]
    if by_index:
        rest = rest.sort(dim=1).values
    rows, device = source.shape[0], source.device
    first, ahead = (protected + 1) // 2, protected // 2  # protected tokens at even and at odd indices
    prefix = torch.arange(protected, device=device).expand(rows, -1)
    others = torch.arange(ahead, count // 2, device=device).expand(rows, -1)
    keep = torch.cat([prefix, 2 * rest[:, first:], 2 * others + 1], dim=1)
    target = partner.gather(1, source) - ahead + protected + rest.shape[1] - first
    return keep, 2 * source, target
