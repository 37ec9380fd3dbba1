# SPDX-License-Identifier: Apache-2.0
"""Greedy selection of the tokens that cover all others best: the next one adds most to how well each is covered.

A table tells how well a candidate would cover each row, `[S, N, R]`; what is to be covered may be the tokens
themselves, words of a question, or both. A row is covered as well as by the best that is taken. Nothing here asks the
device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenprune.kernels.dispatch import operation
from tokenprune.kernels.temporal import unit

_STEPS = 2.0**20


def cosines(a: Tensor, b: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """float32 `[S, A, B]`: cosine of each vector of `a` `[S, A, D]` to each of `b` `[S, B, D]` (None: of a).

    Those of `a` among themselves are to a multiple of 2**-20, so that equal vectors have exactly 1 and equal pairs
    equal cosines. A vector of zeros, or with NaN in it, is similar to nothing; so is padding of `a` (mask: bool `[S,
    A]`, False there).
    """
    first = unit(a) if mask is None else unit(a.masked_fill(~mask.unsqueeze(2), 0))
    if b is not None:
        return first @ unit(b).transpose(1, 2)
    return (first @ first.transpose(1, 2)).mul_(_STEPS).round_().div_(_STEPS)


def first_largest(score: Tensor) -> Tensor:
    """long `[R]`: the first of the largest entries of each row; argmax may name any of equal ones."""
    return (score == score.amax(1, keepdim=True)).to(torch.uint8).argmax(1)


def _limits(table: Tensor, cover: Tensor) -> str | None:
    fine = table.dtype == cover.dtype == torch.float32
    return None if fine else f"it takes float32, not {table.dtype} and {cover.dtype}"


@operation(kernel="tokenprune.kernels.coverage_triton:coverage_gain", limits=_limits)
def coverage_gain(table: Tensor, cover: Tensor) -> Tensor:
    """float32 `[S, N]`: how much each candidate adds to how well all rows are covered.

    table: float32 `[S, N, R]`; cover: float32 `[S, R]`, how well each row is covered so far; inf leaves a row out.
    """
    return (table - cover.unsqueeze(1)).clamp_(min=0).sum(2)


def most_covering(table: Tensor, mask: Tensor, number: Tensor, most: int, factor: Tensor | None = None) -> Tensor:
    """bool `[S, N]`: take again and again the candidate with the largest `coverage_gain`.

    table: float32 `[S, N, R]`, 0 in rows of padding; mask: bool `[S, N]`, what can be taken; number: long `[S]`, how
    many to take, at most `most` and those of the mask. factor: float `[S, N]` or None, at least 0: what the gain of
    each candidate is multiplied with. Of equal ones the lower index.
    """
    cover = table.new_zeros(len(table), table.shape[2])
    barred, rows = ~mask, torch.arange(len(table), device=table.device)
    for step in range(most):
        gain = coverage_gain(table, cover)
        pick = first_largest((gain if factor is None else gain * factor).masked_fill(barred, -torch.inf))
        barred[rows, pick] |= step < number
        cover = torch.maximum(cover, table[rows, pick])
    return barred & mask
