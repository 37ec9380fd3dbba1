# SPDX-License-Identifier: Apache-2.0
"""Operations that move kept tokens together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation

if TYPE_CHECKING:
    from torch import Tensor


@operation(kernel="tokenprune.kernels.compact_triton:partition")
def partition(first: Tensor) -> Tensor:
    """Return the stable order that puts the True entries of each row first.

    Args:
        first: bool `[B, W]`.

    Returns:
        Indices, long `[B, W]`. True and False entries keep their order. The kernel returns the same indices.

    Examples:
        >>> partition(torch.tensor([[False, True, False, True]])).tolist()
        [[1, 3, 0, 2]]
    """
    if first.device.type == "cpu":
        return torch.from_numpy((~first.numpy()).argsort(axis=1, kind="stable"))
    return (~first).to(torch.uint8).argsort(dim=1, stable=True)


@operation(kernel="tokenprune.kernels.compact_triton:gather_tokens")
def gather_tokens(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather tokens along `dim`, row by row. The kernel and the reference copy bit for bit.

    Args:
        x: Tensor of any dtype. The batch axis (size B or 1) is directly before `dim`.
        index: Tokens to gather, long `[B, W]`.
        dim: Token axis of `x`.

    Returns:
        `x` with size W along `dim`, and the batch axis expanded to B.

    Examples:
        >>> x = torch.tensor([[[1.0], [2.0], [3.0]]])
        >>> gather_tokens(x, torch.tensor([[2, 0]]), 1).flatten().tolist()
        [3.0, 1.0]
    """
    dim = dim % x.ndim
    batch = dim - 1
    if x.shape[batch] == len(index) == 1:
        return x.index_select(dim, index[0])
    if x.shape[batch] > 1:
        index = index.add(torch.arange(len(index), device=index.device)[:, None], alpha=x.shape[dim])
    # index_select on flattened rows copies whole tokens, which is much faster than gathering elements.
    gathered = x.flatten(batch, dim).index_select(batch, index.flatten())
    return gathered.view(*x.shape[:batch], *index.shape, *x.shape[dim + 1 :])
