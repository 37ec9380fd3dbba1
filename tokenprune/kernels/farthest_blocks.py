# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the farthest tokens where there are too many for a table of all similarities.

What is known of a token is a bound: it is at most that far from what is taken, and distances only fall. So only those
with the largest bounds are compared with what they have not seen yet, a block of them in one product, and the picks
among them are final while they beat all other bounds. A token that is near some early pick is compared with few.

Comparisons need distances that do not depend on where they were computed, but a BLAS rounds a product by its shape. So
all products here have one shape: copies of a token are exactly as far from everything, and ties go to the lower index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

ROWS, COLUMNS = 512, 128  # tokens of the two sides of every product
_PARTS = 16  # one of so many tokens is in a block of candidates
_STEPS = 32  # in which the tokens that may be most alone see all others


class Leaders(NamedTuple):
    """The first tokens by value, among equals by index.

    indices: long `[n]`, ascending. value, last: the value of the last of them, and its index.
    """

    indices: Tensor
    value: float
    last: int

    @staticmethod
    def from_values(value: Tensor, number: int) -> Leaders:
        """Return the first `number` of the tokens with these values, float `[N]`."""
        least = value.topk(number).values[-1]
        above, equal = (value > least).nonzero().flatten(), (value == least).nonzero().flatten()
        equal = equal[: number - len(above)]
        return Leaders(torch.cat([above, equal]).sort().values, float(least), int(equal[-1]))


def cosine_distances(a: Tensor, b: Tensor) -> Tensor:
    """float32 `[n, m]`: cosine distances of vectors of length 1, `[n, D]` and `[m, D]`. The distance of two vectors is
    the same number wherever they stand."""
    out = a.new_empty(-(-len(a) // ROWS) * ROWS, -(-len(b) // COLUMNS) * COLUMNS)
    rows, columns = pad_rows(a, ROWS), pad_rows(b, COLUMNS)
    for i in range(0, len(rows), ROWS):
        for j in range(0, len(columns), COLUMNS):
            part = out[i : i + ROWS, j : j + COLUMNS]
            torch.mm(rows[i : i + ROWS], columns[j : j + COLUMNS].T, out=part)
    return out[: len(a), : len(b)].neg_().add_(1)


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Return `x` `[n, D]` with zeros after it up to a multiple of so many rows."""
    missing = -len(x) % multiple
    return torch.cat([x, x.new_zeros(missing, x.shape[1])]) if missing else x


def find_most_isolated(unit: Tensor) -> int:
    """Return the token whose nearest other is farthest away, of equal ones the first. unit: float32 `[N, D]`, finite,
    of length 1 or 0; N is at least 2."""
    count, index = len(unit), torch.arange(len(unit), device=unit.device)
    # near: at most that far is the nearest other.
    near = torch.full((count,), torch.inf, dtype=torch.float32, device=unit.device)
    known = torch.zeros(count, dtype=torch.bool, device=unit.device)  # exactly that far
    best: float = -torch.inf
    first = count

    def compare_with_all(place: Tensor) -> Tensor:
        nonlocal best, first
        apart = cosine_distances(unit, unit[place])
        apart.scatter_(0, place.unsqueeze(0), torch.inf)
        torch.minimum(near, apart.amin(1), out=near)
        near[place] = exact = torch.minimum(near[place], apart.amin(0))
        known.index_fill_(0, place, True)
        value = float(exact.max())
        here = int(place[exact == value].min())
        if value > best or (value == best and here < first):
            best, first = value, here
        return apart

    def candidates() -> Tensor:
        return ~known & ((near > best) | ((near == best) & (index < first)))

    # Every token with those of the same neighbourhood: who is near the same one of a few, is likely near each other.
    seeds = index[:: -(-count // COLUMNS)]
    order = compare_with_all(seeds).argmin(1).argsort(stable=True)
    for group in order.split(ROWS):
        apart = cosine_distances(unit[group], unit[group]).fill_diagonal_(torch.inf)
        near[group] = torch.minimum(near[group], apart.amin(1))

    for some in index.split(max(COLUMNS, -(-count // _STEPS))):
        wanted = candidates()
        number = int(wanted.sum())
        if number == 0:
            return first
        # The most promising are finished, so that others can be ruled out.
        compare_with_all(Leaders.from_values(near.masked_fill(~wanted, -torch.inf), min(number, COLUMNS)).indices)
        left = candidates().nonzero().flatten()
        for columns in some.split(COLUMNS):
            apart = cosine_distances(unit[left], unit[columns])
            apart.masked_fill_(left[:, None] == columns, torch.inf)
            near[left] = torch.minimum(near[left], apart.amin(1))
    # What is still wanted has seen all.
    near.masked_fill_(~candidates(), -torch.inf)[first] = best
    return Leaders.from_values(near, 1).last


def select_farthest_blocked(unit: Tensor, number: int) -> Tensor:
    """bool `[N]`: which `number` tokens are taken; see `farthest`. Waits for the device, for each block of picks.

    unit: float32 `[N, D]`, of length 1 or 0, or NaN; number: at most N.
    """
    taken = torch.zeros(len(unit), dtype=torch.bool, device=unit.device)
    if number == 0:
        return taken
    broken = (~unit.isfinite().all(1)).nonzero().flatten()
    if len(broken):
        # All are equally far from one another, then from a vector that is not finite, which is second.
        taken[broken[:1]] = number > 1
        taken[0] = True
        taken[(~taken).nonzero().flatten()[: number - int(taken.sum())]] = True
        return taken
    if len(unit) == 1:
        return ~taken
    first, done = find_most_isolated(unit), 1
    picks = unit.new_zeros(number, unit.shape[1])
    picks[0] = unit[first]
    bound = cosine_distances(unit, picks[:1])[:, 0].clone()  # -inf for what is taken
    bound[first] = -torch.inf
    seen = torch.ones(len(unit), dtype=torch.long, device=unit.device)  # so many picks are in the bound
    block = max(ROWS, len(unit) // _PARTS)
    while done < number:
        place, value, last = Leaders.from_values(bound, min(block, len(unit) - done))
        start = int(seen[place].min())
        apart = bound[place]
        if start < done:
            apart = torch.minimum(apart, cosine_distances(unit[place], picks[start:done]).amin(1))
            bound[place], seen[place] = apart, done
        # Those that still beat all outside of the block.
        ahead = ((apart > value) | ((apart == value) & (place <= last))).nonzero().flatten()
        if len(ahead) > ROWS:
            leaders = Leaders.from_values(apart[ahead], ROWS)
            value, last = leaders.value, int(place[ahead[leaders.last]])
            ahead = ahead[leaders.indices]
        place, apart = place[ahead], apart[ahead]
        among = cosine_distances(unit[place], unit[place]).cpu()
        chosen, apart = _walk(among, apart.cpu(), place.tolist(), value, last, number - done)
        bound[place] = apart.to(unit.device)
        picks[done : done + len(chosen)] = unit[place[chosen]]
        done += len(chosen)
        seen[place] = done
    return bound == -torch.inf


def _walk(
    among: Tensor, apart: Tensor, place: list[int], value: float, last: int, number: int
) -> tuple[list[int], Tensor]:
    """Pick the farthest of a block, at most `number`, while it beats (value, last), those of the first token outside.

    among: float `[n, n]`, their distances; apart: float `[n]`, from what is taken; place: their indices, ascending.
    Returns the picks, and `apart` after them, -inf for the picks.
    """
    chosen: list[int] = []
    while place and len(chosen) < number:
        best, at = apart.max(0)  # of equal ones the first
        pick = int(at)
        if best.item() < value or (best.item() == value and place[pick] > last):
            break
        chosen.append(pick)
        torch.minimum(apart, among[pick], out=apart)
        apart[pick] = -torch.inf
    return chosen, apart
