# SPDX-License-Identifier: Apache-2.0
"""visipruner: a loop written from its description."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best


def naive_parts(attention: Tensor, values: Tensor, output: Tensor) -> tuple[list[float], list[float]]:
    """attention: `[H, n]`; values: `[n, Hkv, D]`; output: `[H, D]`. Lengths of the parts, and cosines without them."""
    heads, count = attention.shape
    whole = output.double().flatten()
    lengths, cosines = [], []
    for j in range(count):
        part = torch.stack(
            [attention[h, j].double() * values[j, h * values.shape[1] // heads].double() for h in range(heads)]
        )
        left = whole - part.flatten()
        lengths.append(float(part.norm()))
        cosines.append(float(left @ whole / (left.norm() * whole.norm())))
    return lengths, cosines


def naive(seen: Arrived, decoder: Any, part: float) -> list[int]:
    attention = seen.before[:, seen.last]
    heads = len(attention)
    values = seen.values.repeat_interleave(heads // seen.values.shape[1], 1)
    output = torch.stack([attention[h] @ values[:, h] for h in range(heads)])
    lengths, cosines = naive_parts(attention[:, seen.places], seen.values[seen.places], output)
    assert min(cosines) < 0.995  # else nothing would have been cut here
    number = min(round(0.5 * len(seen.places)), max(1, sum(one > part for one in lengths)))
    return [seen.places[i] for i in best(lengths, number)]


ROWS = {
    "visipruner": Cuts(
        naive=naive,
        tried=({"part": 0.0}, {"part": 0.1}, {"part": 1e6}),
        refused=({"turns": 1.5}, {"part": -1}, {"part": True}),
        layers=(3,),
    )
}
