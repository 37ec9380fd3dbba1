# SPDX-License-Identifier: Apache-2.0
"""Bring together the tokens that stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor


@operation(kernel="tokenprune.kernels.compact_triton:partition")
def partition(first: Tensor) -> Tensor:
    """Return the order, long `[B, W]`, that puts the places where `first` (bool `[B, W]`) is True before the others;
    among either they stay in order."""
    return (~first).to(torch.uint8).argsort(dim=1, stable=True)


@operation(kernel="tokenprune.kernels.compact_triton:gather_tokens")
def gather_tokens(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather tokens along `dim`, row by row.

    x: any shape with the batch (size B or 1) right before `dim`. index: long `[B, W]`. Returns x with `dim` of size W,
    and the batch expanded to B.
    """
    dim = dim % x.ndim
    batch = dim - 1
    if x.shape[batch] > 1:
        index = index.add(torch.arange(len(index), device=index.device)[:, None], alpha=x.shape[dim])
    # Rows laid end to end: taking whole tokens is much faster than gathering their elements.
    found = x.flatten(batch, dim).index_select(batch, index.flatten())
    return found.view(*x.shape[:batch], *index.shape, *x.shape[dim + 1 :])
