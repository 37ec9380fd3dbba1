# SPDX-License-Identifier: Apache-2.0
"""Greedy MAP inference for a determinantal point process (DPP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.pairs import Products
from tokenprune.kernels.picks import Picks

if TYPE_CHECKING:
    from torch import Tensor

DEPENDENT = 1e-5  # share of its diagonal entry below which a token is linearly dependent on the selection


def _limits(a: Tensor, b: Tensor, *args: object, **kwargs: object) -> str | None:
    fine = a.dtype == b.dtype == torch.float32
    return None if fine else f"it takes float32, not {a.dtype} and {b.dtype}"


def rank_dependent(diagonal: Tensor) -> Tensor:
    """Return negative scores of linearly dependent tokens, float32 `[S, N]`, in the order of their `diagonal`."""
    rank = torch.arange(diagonal.shape[1], device=diagonal.device)
    order = diagonal.argsort(dim=1, descending=True, stable=True)
    return -1.0 - torch.empty_like(diagonal).scatter_(1, order, rank.to(diagonal.dtype).expand_as(diagonal))


@operation(kernel="tokenprune.kernels.dpp_triton:greedy_dpp", limits=_limits)
def greedy_dpp(
    a: Tensor,
    b: Tensor,
    mask: Tensor,
    count: Tensor,
    max_count: int,
    ridge: float = 0.0,
    diagonal: Tensor | None = None,
) -> Tensor:
    """Greedily select the tokens whose kernel submatrix has the largest determinant.

    Each step selects the token that most increases `det(L + ridge * I)`, with a Cholesky factor that grows by one row.
    L is `a @ b.T`. Only the rows of selected tokens are computed, so memory is O(N max_count).

    Tokens that depend linearly on the selection (duplicates, or all tokens once the rank of L is reached) come last,
    ordered by their diagonal entry. Ties go to the lower index. The kernel computes products in another order, so
    near-ties may resolve differently.

    Args:
        a: float32 `[S, N, D]`.
        b: float32 `[S, N, D]`, such that L is symmetric and positive semidefinite.
        mask: Candidates, bool `[S, N]`.
        count: Number of tokens to select, long `[S]`, at most the number of candidates.
        max_count: Maximum of `count`.
        ridge: Nonnegative constant added to the diagonal of L.
        diagonal: Diagonal of L, float32 `[S, N]`. Pass it if it is known: computed entries of vectors of equal length
            differ by rounding, which depends on the batch.

    Returns:
        Selected tokens, bool `[S, N]`.

    Examples:
        >>> x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
        >>> greedy_dpp(x, x, torch.ones(1, 3).bool(), torch.tensor([2]), 2).tolist()
        [[True, False, True]]
    """
    products = Products(a, b)
    diagonal = (products.diagonal() if diagonal is None else diagonal).clamp(min=0)
    picks, last, least = Picks(mask), rank_dependent(diagonal), DEPENDENT * diagonal
    if diagonal.device.type == "cpu":
        from tokenprune.kernels.host_loops import pick_independent

        taken = pick_independent(products, picks.bar, diagonal, least, last, ridge, max_count)
        return picks.first_picks(count, taken)
    # Conditional variance without the ridge: adding the ridge first would lose small values to rounding.
    left, rows = diagonal.clone(), torch.arange(len(diagonal), device=diagonal.device)
    factor = diagonal.new_zeros(len(diagonal), max_count, diagonal.shape[1])
    for step in range(max_count):
        new = left > least
        pick = picks.take_best(picks.mask_taken(torch.where(new, left, last)))
        pick_column = pick.unsqueeze(1)
        explained = torch.bmm(factor[rows, :step, pick].unsqueeze(1), factor[:, :step]).squeeze(1)
        length = (left.gather(1, pick_column) + ridge).clamp_(min=torch.finfo(diagonal.dtype).tiny).sqrt_()
        row = torch.where(new.gather(1, pick_column), (products.segment_rows(pick) - explained) / length, 0)
        factor[:, step] = row
        left = (left - row.square()).clamp_(min=0)
    return picks.first_picks(count)
