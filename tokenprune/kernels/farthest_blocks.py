# SPDX-License-Identifier: Apache-2.0
"""Greedy farthest-token selection without a table of all similarities, for many tokens.

Each token has an upper bound of its distance to the selected tokens, because distances only fall. Only the tokens with
the largest bounds are compared with recent picks, one block per matrix product. Picks from a block are final while they
beat the bounds of all other tokens. A token near an early pick takes part in few comparisons.

Ties need distances that are independent of the position in a matrix, but BLAS rounding depends on the shape. So all
products here have the same shape. Copies of a token then have equal distances, and ties go to the lower index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS = 512, 128  # shape of every product
_PARTS = 16  # a candidate block holds 1 / _PARTS of the tokens
_STEPS = 32  # blocks of columns that isolated tokens are compared with


class Leaders(NamedTuple):
    """The tokens with the largest values; ties go to the lower index.

    Attributes:
        indices: Token indices, long `[n]`, ascending.
        value: Value of the last leader.
        last: Index of the last leader.
    """

    indices: Tensor
    value: float
    last: int

    @staticmethod
    def from_values(value: Tensor, count: int) -> Leaders:
        """Create the first `count` leaders of the values, float `[N]`."""
        least = value.topk(count).values[-1]
        above, equal = (value > least).nonzero().flatten(), (value == least).nonzero().flatten()
        equal = equal[: count - len(above)]
        return Leaders(torch.cat([above, equal]).sort().values, float(least), int(equal[-1]))


def cosine_distances(a: Tensor, b: Tensor) -> Tensor:
    """Return cosine distances of unit vectors `[n, D]` and `[m, D]`, float32 `[n, m]`.

    The distance of two vectors does not depend on their row and column.
    """
    out = a.new_empty(-(-len(a) // ROWS) * ROWS, -(-len(b) // COLUMNS) * COLUMNS)
    rows, columns = pad_rows(a, ROWS), pad_rows(b, COLUMNS)
    for i in range(0, len(rows), ROWS):
        for j in range(0, len(columns), COLUMNS):
            part = out[i : i + ROWS, j : j + COLUMNS]
            torch.mm(rows[i : i + ROWS], columns[j : j + COLUMNS].T, out=part)
    return out[: len(a), : len(b)].neg_().add_(1)


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Append zero rows to `x` `[n, D]` up to a multiple of `multiple`."""
    missing = -len(x) % multiple
    return torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x


def find_most_isolated(unit: Tensor) -> int:
    """Return the index of the token with the largest distance to its nearest other token; ties go to the lower index.

    Args:
        unit: float32 `[N, D]` with N >= 2, finite, of length 1 or 0.
    """
    count, index = len(unit), torch.arange(len(unit), device=unit.device)
    # Upper bound of the distance to the nearest other token.
    bound = torch.full((count,), torch.inf, dtype=torch.float32, device=unit.device)
    known = torch.zeros(count, dtype=torch.bool, device=unit.device)  # the bound is exact
    best: float = -torch.inf
    first = count

    def compare_with_all(indices: Tensor) -> Tensor:
        nonlocal best, first
        apart = cosine_distances(unit, unit[indices])
        apart.scatter_(0, indices.unsqueeze(0), torch.inf)
        torch.minimum(bound, apart.amin(1), out=bound)
        bound[indices] = exact = torch.minimum(bound[indices], apart.amin(0))
        known.index_fill_(0, indices, True)
        value = float(exact.max())
        here = int(indices[exact == value].min())
        if value > best or (value == best and here < first):
            best, first = value, here
        return apart

    def candidates() -> Tensor:
        return ~known & ((bound > best) | ((bound == best) & (index < first)))

    # Compare tokens with the same nearest seed first, because these are likely close to each other.
    seeds = index[:: -(-count // COLUMNS)]
    order = compare_with_all(seeds).argmin(1).argsort(stable=True)
    for group in order.split(ROWS):
        apart = cosine_distances(unit[group], unit[group]).fill_diagonal_(torch.inf)
        bound[group] = torch.minimum(bound[group], apart.amin(1))

    for some in index.split(max(COLUMNS, -(-count // _STEPS))):
        candidate_mask = candidates()
        num_candidates = int(candidate_mask.sum())
        if num_candidates == 0:
            return first
        # Exact distances of the best candidates rule out others.
        compare_with_all(
            Leaders.from_values(bound.masked_fill(~candidate_mask, -torch.inf), min(num_candidates, COLUMNS)).indices
        )
        left = candidates().nonzero().flatten()
        for columns in some.split(COLUMNS):
            apart = cosine_distances(unit[left], unit[columns])
            apart.masked_fill_(left[:, None] == columns, torch.inf)
            bound[left] = torch.minimum(bound[left], apart.amin(1))
    # The remaining candidates have been compared with all tokens.
    bound.masked_fill_(~candidates(), -torch.inf)[first] = best
    return Leaders.from_values(bound, 1).last


def select_farthest_blocked(unit: Tensor, count: int) -> Tensor:
    """Select `count` tokens as `farthest` does. Synchronizes for each block of picks.

    Args:
        unit: float32 `[N, D]`, of length 1 or 0, or NaN.
        count: Number of tokens to select, at most N.

    Returns:
        Selected tokens, bool `[N]`.
    """
    taken = torch.zeros(len(unit), dtype=torch.bool, device=unit.device)
    if count == 0:
        return taken
    broken = (~unit.isfinite().all(1)).nonzero().flatten()
    if len(broken):
        # NaN counts as farthest: token 0 is picked first, the first non-finite token second, then the lowest indices.
        taken[broken[:1]] = count > 1
        taken[0] = True
        taken[(~taken).nonzero().flatten()[: count - int(taken.sum())]] = True
        return taken
    if len(unit) == 1:
        return ~taken
    first, done = find_most_isolated(unit), 1
    picks = unit.new_zeros(count, unit.shape[1])
    picks[0] = unit[first]
    bound = cosine_distances(unit, picks[:1])[:, 0].clone()  # -inf for selected tokens
    bound[first] = -torch.inf
    num_compared = torch.ones(len(unit), dtype=torch.long, device=unit.device)  # picks included in the bound
    block = max(ROWS, len(unit) // _PARTS)
    while done < count:
        indices, value, last = Leaders.from_values(bound, min(block, len(unit) - done))
        start = int(num_compared[indices].min())
        apart = bound[indices]
        if start < done:
            apart = torch.minimum(apart, cosine_distances(unit[indices], picks[start:done]).amin(1))
            bound[indices], num_compared[indices] = apart, done
        # Tokens that still beat the bounds of all tokens outside of the block.
        ahead = ((apart > value) | ((apart == value) & (indices <= last))).nonzero().flatten()
        if len(ahead) > ROWS:
            leaders = Leaders.from_values(apart[ahead], ROWS)
            value, last = leaders.value, int(indices[ahead[leaders.last]])
            ahead = ahead[leaders.indices]
        indices, apart = indices[ahead], apart[ahead]
        among = cosine_distances(unit[indices], unit[indices]).cpu()
        chosen, apart = _walk(among, apart.cpu(), indices.tolist(), value, last, count - done)
        bound[indices] = apart.to(unit.device)
        picks[done : done + len(chosen)] = unit[indices[chosen]]
        done += len(chosen)
        num_compared[indices] = done
    return bound == -torch.inf


def _walk(
    among: Tensor, apart: Tensor, indices: list[int], value: float, last: int, count: int
) -> tuple[list[int], Tensor]:
    """Select the farthest tokens of a block while they beat (value, last), the first token outside of it.

    Args:
        among: Distances within the block, float `[n, n]`.
        apart: Distance of each token to the selected tokens, float `[n]`.
        indices: Token indices of the block, ascending.
        value: Bound of the first token outside of the block.
        last: Index of that token.
        count: Maximum number of picks.

    Returns:
        The picks, and the updated `apart`, -inf for the picks.
    """
    chosen: list[int] = []
    while indices and len(chosen) < count:
        best, argmax = apart.max(0)  # the first index among ties
        pick = int(argmax)
        if best.item() < value or (best.item() == value and indices[pick] > last):
            break
        chosen.append(pick)
        torch.minimum(apart, among[pick], out=apart)
        apart[pick] = -torch.inf
    return chosen, apart
