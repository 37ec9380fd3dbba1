# SPDX-License-Identifier: Apache-2.0
"""adaptinfer: a loop written from its description."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived


def naive(seen: Arrived, decoder: Any, dynamic: float) -> list[int]:
    """Words weigh by what words make of them."""
    score = dict.fromkeys(seen.places, 0.0)
    for head in seen.before.double():
        weight = []
        for j in seen.text:
            gave = sum(float(head[j, i]) for i in seen.text)
            got = sum(float(head[i, j]) for i in seen.text)
            weight.append(gave + got - float(head[j, j]))
        mean = sum(weight) / len(weight)
        for j, one in zip(seen.text, weight, strict=True):
            for i in seen.places:
                score[i] += (dynamic * one + (1 - dynamic) * mean) * float(head[j, i])
    return sorted(seen.places, key=lambda i: (-score[i], i))[: seen.keep]


ROWS = {
    "adaptinfer": Cuts(
        naive=naive,
        tried=({"dynamic": 1.0}, {"dynamic": 0.4}),
        refused=({"dynamic": 1.5}, {"dynamic": "1"}, {"layers": (1, 2, 2)}),
        layers=(1, 2, 3),
    )
}
