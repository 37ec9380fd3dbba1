# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the tokens whose kernel has the largest determinant (a determinantal point process)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.pairs import PickedRows, Products
from tokenprune.kernels.picks import Picks

if TYPE_CHECKING:
    from torch import Tensor

DEPENDENT = 1e-5  # share of a token's own variance below which it says nothing new, in float32


def _limits(a: Tensor, b: Tensor, *args: object, **kwargs: object) -> str | None:
    fine = a.dtype == b.dtype == torch.float32
    return None if fine else f"it takes float32, not {a.dtype} and {b.dtype}"


def rank_dependent(own: Tensor) -> Tensor:
    """float32 `[S, N]`, below 0: what tokens that say nothing new are taken by, the largest of `own` `[S, N]` first."""
    place = torch.arange(own.shape[1], device=own.device)
    order = own.argsort(dim=1, descending=True, stable=True)
    return -1.0 - torch.empty_like(own).scatter_(1, order, place.to(own.dtype).expand_as(own))


@operation(kernel="tokenprune.kernels.dpp_triton:greedy_dpp", limits=_limits)
def greedy_dpp(
    a: Tensor, b: Tensor, mask: Tensor, number: Tensor, most: int, ridge: float = 0.0, own: Tensor | None = None
) -> Tensor:
    """bool `[S, N]`: take again and again the token that raises the determinant of `L + ridge * I` over those taken
    most, by a Cholesky factor that grows by one row each time. L are the products of all pairs of a and b, of which
    only the rows of those taken are made: memory is O(N most).

    a, b: float32 `[S, N, D]`, such that L is symmetric, without negative eigenvalues (for `a @ a.T`, a twice); mask:
    bool `[S, N]`, what can be taken; number: long `[S]`, how many, at most `most` and those of the mask; own: float32
    `[S, N]`, the diagonal of L where it is known: products tell tokens of equal length apart by rounding, which a
    batch may do otherwise. Of equal ones the lower index. Tokens that depend on those taken (duplicates; all that is
    left, if more are wanted than L has dimensions) come last, by their own entries of the diagonal.
    """
    products = Products(a, b)
    row_of, picks = PickedRows(products), Picks(mask)
    own = (products.diagonal() if own is None else own).clamp(min=0)
    last, least = rank_dependent(own), DEPENDENT * own
    # What a token adds to those taken, beside the ridge: 1 + a little would lose the little.
    left, rows = own.clone(), torch.arange(len(own), device=own.device)
    factor = own.new_zeros(len(own), most, own.shape[1])
    for step in range(most):
        new = left > least
        score = picks.mask_taken(torch.where(new, left, last))
        pick = picks.take_best(score)
        if own.device.type == "cpu" and not new.gather(1, pick.unsqueeze(1)).any():
            continue  # its row is 0, and so are all to come
        one = pick.unsqueeze(1)
        explained = torch.bmm(factor[rows, :step, pick].unsqueeze(1), factor[:, :step]).squeeze(1)
        length = (left.gather(1, one) + ridge).clamp_(min=torch.finfo(own.dtype).tiny).sqrt_()
        row = torch.where(new.gather(1, one), (row_of(pick, score) - explained) / length, 0)
        factor[:, step] = row
        left = (left - row.square()).clamp_(min=0)
    return picks.first_picks(number)
