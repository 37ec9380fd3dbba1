# SPDX-License-Identifier: Apache-2.0
"""Loops and index computations of selections on the CPU, in NumPy.

They consist of many small operations, and a call of NumPy takes a fraction of the time of a call of PyTorch. Additions,
products, quotients and comparisons have equal results in both. Matrix products, sums and roots, whose rounding differs,
are PyTorch's. The arrays share memory with tensors.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pick_farthest(table: Tensor, num_picks: int) -> Tensor:
    """Select tokens that are farthest from each other. See `farthest`.

    Args:
        table: Similarity of all pairs, float32 `[N, N]`, -inf on the diagonal.
        num_picks: Number of tokens to select.

    Returns:
        Selected tokens, bool `[N]`.
    """
    table = table.detach()
    rows, distance = table.numpy(), (1 - table.amax(dim=1)).numpy()
    taken = np.zeros(len(rows), dtype=bool)
    for step in range(num_picks):
        pick = distance.argmax()
        taken[pick] = True
        distance = 1 - rows[pick] if step == 0 else np.minimum(distance, 1 - rows[pick], out=distance)
        distance[pick] = -np.inf
    return torch.from_numpy(taken)


def take_in_turn(score: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Let pickers in turn select tokens. See `take.take_in_turn`.

    Args:
        score: Scores without NaN, float32 `[S, P, N]`.
        mask: Candidates, bool `[S, N]`.
        count: Number of tokens of each picker, long `[S, P]`.

    Returns:
        Selected tokens, bool `[S, N]`.
    """
    least, available, counts = -score.numpy(), mask.numpy(), count.tolist()
    left = available.copy()
    for segment, numbers in enumerate(counts):
        row = left[segment]
        for turn, num_tokens in enumerate(numbers):
            # NaN sorts last, so that -inf is a valid score.
            order = np.where(row, least[segment, turn], np.float32(np.nan)).argsort(kind="stable")
            row[order[: max(0, int(num_tokens))]] = False
    return torch.from_numpy(available ^ left)


def find_destinations(
    assign: Tensor, mask: Tensor, output_index: Tensor, weight: Tensor | None, num_outputs: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `join.destinations` on the CPU."""
    index, outputs = assign.numpy(), output_index.numpy()
    weights = np.ones(outputs.shape, dtype=np.float32) if weight is None else weight.detach().float().numpy()
    absorbed = mask.numpy() & (index >= 0)
    itself = absorbed & (index == np.arange(outputs.shape[1]))
    own_weight = np.zeros(num_outputs, dtype=np.float32)
    own_weight[outputs[itself]] = weights[itself]
    joined = np.take_along_axis(outputs, np.maximum(index, 0), axis=1)
    target = np.where(absorbed & ~itself, joined, num_outputs)
    return tuple(torch.from_numpy(array.reshape(-1)) for array in (own_weight, target, weights))  # type: ignore[return-value]


def order_sources(source: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order sources by their target. See `join.join`.

    Returns:
        The order and the sources in this order, both `[r]`; the number of the target of each source, `[r]`; and the
        target of each number, `[r]`, `count` for unused numbers. All long.
    """
    targets = target.numpy()
    order = targets.argsort(kind="stable")
    targets = targets[order]
    slot = np.concatenate([np.zeros(1, dtype=np.int64), (np.diff(targets) != 0).cumsum()])[: len(targets)]
    row = np.full_like(targets, count)
    row[slot] = targets
    return tuple(map(torch.from_numpy, (order, source.numpy()[order], slot, row)))  # type: ignore[return-value]


def rank_in_group(group: Tensor, *keys: Tensor) -> Tensor:
    """Do as `take.rank_in_group` on the CPU."""
    groups = group.numpy()
    columns: list[np.ndarray] = []
    for key in keys:
        values = (key.float() if key.dtype == torch.bfloat16 else key).detach().numpy()
        if values.dtype.kind == "f":
            has_value = ~np.isnan(values)
            columns += [has_value, np.where(has_value, -values, 0)]  # NaN is largest
        else:
            columns.append(~values)  # the largest first, without overflow
    order = np.lexsort((*columns[::-1], groups), axis=-1)
    in_order, index = np.take_along_axis(groups, order, axis=1), np.arange(groups.shape[1])
    is_first = np.concatenate([np.ones_like(in_order[:, :1], dtype=bool), np.diff(in_order, axis=1) != 0], axis=1)
    start = np.maximum.accumulate(np.where(is_first[:, : len(index)], index, 0), axis=1)
    ranks = np.empty(groups.shape, dtype=np.int64)
    np.put_along_axis(ranks, order, index - start, axis=1)
    return torch.from_numpy(ranks)
