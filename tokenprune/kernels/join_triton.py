# SPDX-License-Identifier: Apache-2.0
"""The kernel of `join.py`: a program for each token that stays adds up its members, in their order, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _join(x, keep, own, source, weight, first, out, D, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    stays = row
    if KEEP:
        stays = tl.load(keep + row)
    value = tl.load(x + stays * D + at, at < D, 0.0)
    total = tl.load(own + row).to(tl.float32)
    mass = value.to(tl.float32) * total
    start, end = tl.load(first + row), tl.load(first + row + 1)
    for member in range(start, end):
        part = tl.load(weight + member).to(tl.float32)
        mass += tl.load(x + tl.load(source + member) * D + at, at < D, 0.0).to(tl.float32) * part
        total += part
    mean = (mass / tl.where(total > 0, total, 1.0)).to(value.dtype)
    tl.store(out + row * D + at, tl.where((end > start) & (total > 0), mean, value), at < D)


def join(
    x: Tensor, keep: Tensor | None, own: Tensor, source: Tensor, target: Tensor, weight: Tensor, *, block: int = 1024
) -> Tensor:
    """See `join.join`. block: features of a program at most."""
    count, width = len(own), x.shape[1]
    out = x.new_empty(count, width)
    order = target.argsort(stable=True)
    # Where in that order the members of each row start.
    first = torch.searchsorted(target[order], torch.arange(count + 1, device=x.device))
    if out.numel():
        block = min(block, triton.next_power_of_2(width))
        _join[count, triton.cdiv(width, block)](
            x.contiguous(), x if keep is None else keep, own, source[order], weight[order], first, out, width,
            KEEP=keep is not None, BLOCK=block,
        )  # fmt: skip
    return out
