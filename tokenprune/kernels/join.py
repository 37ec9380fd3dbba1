# SPDX-License-Identifier: Apache-2.0
"""Weighted means of tokens that are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tokenprune.kernels.dispatch import operation, uses_kernels
from tokenprune.kernels.host_checks import reads_fast

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@operation(kernel="tokenprune.kernels.join_triton:join")
def join(x: Tensor, keep: Tensor | None, own_weight: Tensor, source: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Merge source tokens into target tokens by weighted means.

    Each output token is `sum(w_i x_i) / sum(w_i)` over the kept token and its sources, computed in float32 (float64 for
    float64 input) and rounded to the dtype of `x`. Kept tokens without sources, or with a total weight of 0, are
    copied. Sources are added in their order, so a mean is equal in every run. The kernel adds in the same order.

    Args:
        x: Tokens, `[n, D]`.
        keep: Kept tokens in the order of the output, long `[m]`. None keeps all tokens.
        own_weight: Weights of the kept tokens, float `[m]`.
        source: Tokens to merge, long `[r]`.
        target: Output index of each source, long `[r]`; m drops the source.
        weight: Weights of the sources, float `[r]`.

    Returns:
        Merged tokens, `[m, D]`.

    Examples:
        >>> x, weights = torch.tensor([[0.0], [3.0], [5.0]]), torch.ones(2)
        >>> join(x, torch.tensor([0, 2]), weights, torch.tensor([1]), torch.tensor([1]), weights[:1]).tolist()
        [[0.0], [4.0]]
    """
    count, wide = len(own_weight), torch.float64 if x.dtype == torch.float64 else torch.float32
    if reads_fast(x) and not (own_weight.requires_grad or weight.requires_grad):
        arrays = (tensor.numpy() for tensor in (own_weight.to(wide), source, target, weight.to(wide)))
        return _join_on_cpu(x, keep, *arrays)
    keep = torch.arange(count, device=x.device) if keep is None else keep
    # The extra last row receives dropped sources. Boolean indexing would synchronize with the device.
    out = x.index_select(0, torch.cat([keep, keep.new_zeros(1)]))
    # Only rows with sources are computed: `slot` numbers these rows, and `row` is their output index.
    order = target.argsort(stable=True)
    source, target = source[order], target[order]
    slot = torch.cat([target.new_zeros(1), target.diff().ne(0).cumsum(0)])[: len(target)]
    row = torch.full_like(target, count).scatter(0, slot, target)
    weight = weight[order].to(wide)
    start = torch.cat([own_weight.to(wide), own_weight.new_zeros(1, dtype=wide)])[row]
    total = start.index_add(0, slot, weight)
    mass = (out[row] * start[:, None]).index_add(0, slot, x.index_select(0, source) * weight[:, None])
    mean = (mass / total.masked_fill(total <= 0, 1)[:, None]).to(x.dtype)
    return out.index_copy_(0, torch.where(total > 0, row, count), mean)[:count]


def _join_on_cpu(x: Tensor, keep: Tensor | None, *arrays: np.ndarray) -> Tensor:
    """Do as `join` on the CPU, where the rows to compute are known. `arrays` are those of `host_loops.plan_merges`."""
    from tokenprune.kernels import host_loops

    source, weight, slot, row, start, total = host_loops.plan_merges(*arrays)
    out = x.clone() if keep is None else x.index_select(0, keep)
    if len(row) == 0:
        return out
    mass = (out.index_select(0, row) * start).index_add(0, slot, x.index_select(0, source) * weight)
    return out.index_copy_(0, row, (mass / total).to(x.dtype))


@operation(kernel="tokenprune.kernels.join_triton:destinations")
def destinations(
    assign: Tensor, mask: Tensor, output_index: Tensor, weight: Tensor | None, num_outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert an assignment of tokens to the arguments of `join`.

    Args:
        assign: Index of the token in its row that absorbs each token, long `[S, N]`. Kept tokens have their own index;
            -1 drops a token.
        mask: Valid tokens, bool `[S, N]`.
        output_index: Output index of each token, long `[S, N]`.
        weight: Weight of each token, float `[S, N]`. None is 1.
        num_outputs: Number of output tokens, which is also the target of dropped tokens.

    Returns:
        Weights of kept tokens, float32 `[num_outputs]`, 0 elsewhere; output index of each absorbed token, long `[S *
        N]`, `num_outputs` for others; weights of all tokens, float32 `[S * N]`. The kernel returns equal values.
    """
    if assign.device.type == "cpu" and (weight is None or not weight.requires_grad):
        from tokenprune.kernels import host_loops

        arrays = host_loops.find_destinations(assign, mask, output_index, weight, num_outputs)
        own_weight, target, weights = map(torch.from_numpy, arrays)
        return own_weight, target, weights
    weight = torch.ones_like(output_index, dtype=torch.float32) if weight is None else weight.float()
    absorbed = mask & (assign >= 0)
    itself = absorbed & (assign == torch.arange(output_index.shape[1], device=output_index.device))
    own_weight = weight.new_zeros(num_outputs + 1).scatter(
        0, torch.where(itself, output_index, num_outputs).flatten(), weight.flatten()
    )
    joined = output_index.gather(1, assign.clamp(min=0))
    target = torch.where(absorbed & ~itself, joined, num_outputs)
    return own_weight[:-1], target.flatten(), weight.flatten()


def merge_assigned(
    x: Tensor, assign: Tensor, mask: Tensor, output_index: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Replace the row of each kept token by the weighted mean of the tokens assigned to it.

    Args:
        x: Rows, `[n, D]`.
        assign: Index of the token in its segment that absorbs each token, long `[S, N]`. Kept tokens have their own
            index; -1 drops a token.
        mask: Valid tokens, bool `[S, N]`.
        output_index: Row of each token, long `[S, N]`.
        weight: Weight of each token, float `[S, N]`. None is 1.

    Returns:
        Rows, `[n, D]`. The rows of other tokens are unchanged.

    Examples:
        >>> x, assign = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[0, 2, 2]])
        >>> merge_assigned(x, assign, torch.ones(1, 3).bool(), torch.arange(3)[None]).tolist()
        [[1.0], [2.0], [3.0]]
    """
    if reads_fast(x) and not uses_kernels(x.device) and (weight is None or not weight.requires_grad):
        from tokenprune.kernels import host_loops

        own_weight, target, weights = host_loops.find_destinations(assign, mask, output_index, weight, len(x))
        wide = "float64" if x.dtype == torch.float64 else "float32"
        source = output_index.numpy().reshape(-1)
        own_weight, weights = (array.astype(wide, copy=False) for array in (own_weight, weights))
        return _join_on_cpu(x, None, own_weight, source, target, weights)
    own_weight, target, weights = destinations(assign, mask, output_index, weight, len(x))
    merged: Tensor = join(x, None, own_weight, output_index.flatten(), target, weights)
    return merged
