# SPDX-License-Identifier: Apache-2.0
"""Naive loop of VisiPruner (arXiv 2510.17205)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best


def naive_parts(attention: Tensor, values: Tensor, output: Tensor) -> tuple[list[float], list[float]]:
    """Return the norm of each token's contribution c_j = A[last, j] V_j, and the cosine of o - c_j to the output o.

    attention: `[H, n]`; values: `[n, Hkv, D]`; output: `[H, D]`.
    """
    heads, count = attention.shape
    flat_output = output.double().flatten()
    lengths, cosines = [], []
    for j in range(count):
        contribution = torch.stack(
            [attention[h, j].double() * values[j, h * values.shape[1] // heads].double() for h in range(heads)]
        )
        reduced = flat_output - contribution.flatten()
        lengths.append(float(contribution.norm()))
        cosines.append(float(reduced @ flat_output / (reduced.norm() * flat_output.norm())))
    return lengths, cosines


def naive(arrived: Arrived, decoder: Any, part: float) -> list[int]:
    """Keep the tokens whose contribution is longer than `part`, at most half of them."""
    attention = arrived.before[:, arrived.last]
    heads = len(attention)
    values = arrived.values.repeat_interleave(heads // arrived.values.shape[1], 1)
    output = torch.stack([attention[h] @ values[:, h] for h in range(heads)])
    lengths, cosines = naive_parts(attention[:, arrived.places], arrived.values[arrived.places], output)
    assert min(cosines) < 0.995  # otherwise the method would not cut at this layer
    num_kept = min(round(0.5 * len(arrived.places)), max(1, sum(length > part for length in lengths)))
    return [arrived.places[i] for i in best(lengths, num_kept)]


ROWS = {
    "visipruner": Cuts(
        naive=naive,
        tried=({"part": 0.0}, {"part": 0.1}, {"part": 1e6}),
        refused=({"turns": 1.5}, {"part": -1}, {"part": True}),
        layers=(3,),
    )
}
