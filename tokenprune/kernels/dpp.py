# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the tokens whose kernel has the largest determinant (a determinantal point process)."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.kernels.coverage import first_largest

_DEPENDENT = 1e-5  # share of a token's own variance below which it says nothing new, in float32


def greedy_dpp(kernel: Tensor, mask: Tensor, number: Tensor, most: int, ridge: float = 0.0) -> Tensor:
    """bool `[S, N]`: take again and again the token that raises the determinant of `kernel + ridge * I` over those
    taken most, by a Cholesky factor that grows by one row each time.

    kernel: float32 `[S, N, N]`, symmetric, without negative eigenvalues; mask: bool `[S, N]`, what can be taken;
    number: long `[S]`, how many, at most `most` and those of the mask. Of equal ones the lower index. Tokens that
    depend on those taken (duplicates; all that is left, if more are wanted than the kernel has dimensions) come last,
    by their own entries of the diagonal. Plain PyTorch; nothing here asks the device.
    """
    own = kernel.diagonal(dim1=1, dim2=2).float().clamp(min=0)
    place = torch.arange(own.shape[1], device=own.device)
    last = own.argsort(dim=1, descending=True, stable=True)
    last = -1.0 - torch.empty_like(own).scatter_(1, last, place.to(own.dtype).expand_as(own))
    # What a token adds to those taken, beside the ridge: 1 + a little would lose the little.
    left, barred, rows = own.clone(), ~mask, torch.arange(len(own), device=own.device)
    factor = own.new_zeros(len(own), most, own.shape[1])
    for step in range(most):
        new = left > _DEPENDENT * own
        pick = first_largest(torch.where(new, left, last).masked_fill(barred, -torch.inf))
        barred[rows, pick] |= step < number
        told = torch.einsum("sk,skn->sn", factor[rows, :step, pick], factor[:, :step])
        length = (left[rows, pick] + ridge).clamp(min=torch.finfo(own.dtype).tiny).sqrt()
        row = (kernel[rows, pick].float() - told) / length.unsqueeze(1)
        row = row.masked_fill(~new[rows, pick].unsqueeze(1), 0)
        factor[:, step] = row
        left = (left - row.square()).clamp(min=0)
    return barred & mask
