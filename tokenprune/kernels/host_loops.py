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


def to_array(x: Tensor) -> np.ndarray:
    """Return the values of a tensor on the CPU, without a copy, also if it requires a gradient."""
    return (x.detach() if x.requires_grad else x).numpy()


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
        score: Scores, float32 `[S, P, N]`, or `[S, N]` for a single picker. NaN is lowest.
        mask: Candidates, bool `[S, N]`.
        count: Number of tokens of each picker, long `[S, P]` or `[S]`.

    Returns:
        Selected tokens, bool `[S, N]`.
    """
    scores, available, counts = to_array(score), mask.numpy(), count.tolist()
    if scores.ndim == 2:
        scores, counts = scores[:, None], [[num_tokens] for num_tokens in counts]
    least = np.where(np.isnan(scores), np.float32(np.inf), -scores)
    left = available.copy()
    for segment, numbers in enumerate(counts):
        row = left[segment]
        for turn, num_tokens in enumerate(numbers):
            if num_tokens > 0:
                # NaN sorts last, so that -inf is a valid score.
                order = np.where(row, least[segment, turn], np.float32(np.nan)).argsort(kind="stable")
                row[order[: int(num_tokens)]] = False
    return torch.from_numpy(available ^ left)


def find_destinations(
    assign: Tensor, mask: Tensor, output_index: Tensor, weight: Tensor | None, num_outputs: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Do as `join.destinations` on the CPU, and return arrays."""
    index, outputs = assign.numpy(), output_index.numpy()
    weights = np.ones(outputs.shape, dtype=np.float32) if weight is None else to_array(weight.float())
    absorbed = mask.numpy() & (index >= 0)
    itself = absorbed & (index == np.arange(outputs.shape[1]))
    own_weight = np.zeros(num_outputs, dtype=np.float32)
    own_weight[outputs[itself]] = weights[itself]
    joined = np.take_along_axis(outputs, np.maximum(index, 0), axis=1)
    target = np.where(absorbed & ~itself, joined, num_outputs)
    return own_weight, target.reshape(-1), weights.reshape(-1)


def plan_merges(
    own_weight: np.ndarray, source: np.ndarray, target: np.ndarray, weight: np.ndarray
) -> tuple[Tensor, ...]:
    """Order the sources of `join.join` by their target, without the sources and targets that it does not merge.

    Args:
        own_weight: Weights of the kept tokens, float32 or float64 `[m]`.
        source: Tokens to merge, int64 `[r]`.
        target: Output index of each source, int64 `[r]`; m drops the source.
        weight: Weights of the sources, dtype of `own_weight`, `[r]`.

    Returns:
        The sources, their weights `[q, 1]`, and the number of the target of each source, `[q]`; the output index of
        each target, `[t]`, its own weight and its total weight, `[t, 1]`.
    """
    used = np.flatnonzero(target < len(own_weight))
    used = used[target[used].argsort(kind="stable")]
    rows, slot = np.unique(target[used], return_inverse=True)
    total = own_weight[rows]
    np.add.at(total, slot, weight[used])
    if not (valid := total > 0).all():
        used, slot = used[valid[slot]], (valid.cumsum() - 1)[slot[valid[slot]]]
        rows, total = rows[valid], total[valid]
    arrays = source[used], weight[used][:, None], slot, rows, own_weight[rows][:, None], total[:, None]
    return tuple(map(torch.from_numpy, arrays))


def rank_in_group(group: Tensor, *keys: Tensor) -> Tensor:
    """Do as `take.rank_in_group` on the CPU."""
    groups = group.numpy()
    columns: list[np.ndarray] = []
    for key in keys:
        values = to_array(key.float() if key.dtype == torch.bfloat16 else key)
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


def describe_hidden(visible: Tensor, lowest: float) -> tuple[bool, bool, bool, Tensor | None]:
    """Return the fields of `attention.HiddenKeys` for keys that rows see, bool `[B, 1 or H, R, K]`."""
    sees = visible.numpy()
    if sees.all():
        return False, False, False, None
    hides_keys, hides_queries = not sees.any(axis=(1, 2)).all(), not sees.any(axis=(1, 3)).all()
    bias = torch.from_numpy(np.where(sees, np.float32(0), np.float32(lowest)))
    return hides_keys, hides_queries, not sees.any(axis=3).all(), bias


def find_known(values: Tensor, limit: Tensor | None) -> Tensor:
    """Do as `density._find_known` on the CPU."""
    known = to_array(values) < np.float32(np.inf)
    if limit is not None:
        known &= np.arange(known.shape[2]) < np.maximum(limit.numpy(), 1)[:, None, None]
    return torch.from_numpy(known)


def find_first_max(x: Tensor, tie: float) -> tuple[Tensor, Tensor]:
    """Return the maximum along the last axis, and the first index within `tie` of it. x: float32 `[S, A, B]`."""
    values = to_array(x)
    best = values.max(axis=2)
    index = (values >= (best - np.float32(tie))[..., None]).argmax(axis=2)
    return torch.from_numpy(best), torch.from_numpy(index)


def measure_peaks(distance: Tensor, density: Tensor, is_masked: Tensor | None) -> Tensor:
    """Return the distance to the nearest denser token, or the largest distance if no token is denser.

    Args:
        distance: Distances of all pairs, float32 `[S, N, N]`, inf where `is_masked`.
        density: float32 `[S, N]`. Ties go to the lower index.
        is_masked: Pairs to ignore, bool `[S, N, N]`, or None.

    Returns:
        float32 `[S, N]`.
    """
    values, infinity = to_array(distance), np.float32(np.inf)
    order = (-to_array(density)).argsort(axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1]), axis=1)
    nearest = np.where(rank[:, None] < rank[:, :, None], values, infinity).min(axis=2)
    farthest = (values if is_masked is None else np.where(is_masked.numpy(), -infinity, values)).max(axis=2)
    return torch.from_numpy(np.where(nearest < infinity, nearest, farthest))


def is_valid_assignment(assign: Tensor, keep: Tensor, mask: Tensor) -> bool:
    """Return whether each valid entry of `assign` is -1 or the index of a kept token. All `[S, N]`."""
    target, kept = assign.numpy(), keep.numpy()
    target = np.where(mask.numpy(), target, -1)
    if target.size and (target.min() < -1 or target.max() >= target.shape[1]):
        return False
    return bool((np.take_along_axis(kept, np.maximum(target, 0), axis=1) | (target < 0)).all())
