# SPDX-License-Identifier: Apache-2.0
"""The merge of matched tokens: those that join others, and the places of all afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.match import TIE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_LARGEST = 2**13  # sources of a row that one program of the kernel places


def _limits(best: Tensor, *args: object, **kwargs: object) -> str | None:
    return None if best.shape[1] <= _LARGEST else f"it places {_LARGEST} sources of a row at most, not {best.shape[1]}"


@operation(kernel="tokenprune.kernels.pairing_triton:as_sources")
def as_sources(best: Tensor, partner: Tensor, protected: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the similarities in steps of `TIE`, -inf for what is no source, and the partners, 0 for these.

    best: float32 `[B, ceil(n/2)]` and partner: long, of the tokens at even places, as `best_match` has them. protected:
    the first tokens, which are no sources. real: long `[B]`, the real tokens of each row; None: all are.
    """
    place = 2 * torch.arange(best.shape[1], device=best.device).expand_as(best)
    can = place >= protected
    if real is not None:
        can = can & (place < real[:, None])
    # In steps, so that equal vectors have one similarity, 1, whatever rounding made of it.
    best = (best / TIE).round() * TIE
    return best.masked_fill(~can, -torch.inf), partner.masked_fill(~can, 0)


@operation(kernel="tokenprune.kernels.pairing_triton:pairing", limits=_limits)
def pairing(
    best: Tensor, partner: Tensor, gone: Sequence[int], counts: Sequence[int], protected: int, by_place: bool = True,
    *, on_device: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Let in each row the sources that are most similar to their partners join these.

    best, partner: of `as_sources`. gone: how many leave each row, at most half of what is not protected. counts: the
    real tokens of each row. protected: the first tokens, which stay. on_device: `gone` and `counts` on the device, long
    `[B]`; asked for where rows differ.

    Returns long `[B, m]`, the places of the tokens that stay: the protected, what is left at even places, then those at
    odd places, each in order of place; long `[B, r]`, the places of those that leave, most similar first; and long
    `[B, r]`, where in the first the token is that each joins. A row that nothing leaves stays in its order. What stands
    behind a row's own numbers is padding: any place that there is. by_place=False has what is left at even places by
    falling similarity, where nothing is protected, and as many leave every row.
    """
    if on_device is None:
        return _even(best, partner, gone[0], counts[0], protected, by_place)
    rows, device, width, (fewer, real) = len(gone), best.device, max(counts), on_device
    left = [count - less for count, less in zip(counts, gone, strict=True)]
    order = best.argsort(dim=1, descending=True, stable=True)
    ranks = torch.arange(order.shape[1], device=device)
    leaves = torch.empty_like(order).scatter(1, order, ranks.expand_as(order)) < fewer[:, None]
    # Sorted by kind: 0 protected or left at an even place, 1 at an odd one, 2 gone or padding.
    kind = (torch.arange(width, device=device) % 2).repeat(rows, 1)
    kind[:, ::2] += 2 * leaves
    kind[:, :protected] = 0
    kind.masked_fill_(fewer[:, None] == 0, 0)
    kind.masked_fill_(torch.arange(width, device=device) >= real[:, None], 2)
    sorted_ = kind.argsort(dim=1, stable=True)
    place = torch.empty_like(sorted_).scatter(1, sorted_, torch.arange(width, device=device).expand_as(sorted_))
    source = order[:, : max(gone)]
    target = place.gather(1, 2 * partner.gather(1, source) + 1)
    return sorted_[:, : max(left)], 2 * source, target


def _even(
    best: Tensor, partner: Tensor, gone: int, count: int, protected: int, by_place: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `pairing` does where as many leave every row, of as many."""
    order = best.argsort(dim=1, descending=True, stable=True)
    source, rest = order[:, :gone], order[:, gone:]
    if by_place:
        rest = rest.sort(dim=1).values
    rows, device = source.shape[0], source.device
    first, ahead = (protected + 1) // 2, protected // 2  # protected tokens at even and at odd places
    prefix = torch.arange(protected, device=device).expand(rows, -1)
    others = torch.arange(ahead, count // 2, device=device).expand(rows, -1)
    keep = torch.cat([prefix, 2 * rest[:, first:], 2 * others + 1], dim=1)
    target = partner.gather(1, source) - ahead + protected + rest.shape[1] - first
    return keep, 2 * source, target
