# SPDX-License-Identifier: Apache-2.0
"""Naive loop of AdaptInfer (arXiv 2508.06084)."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived


def naive(arrived: Arrived, decoder: Any, dynamic: float) -> list[int]:
    """Score visual token i by the sum over heads and text tokens j of w_j A[j, i].

    w_j is the attention that text token j gives to the text and receives from it, with the diagonal counted once.
    `dynamic` mixes w_j with its mean.
    """
    score = dict.fromkeys(arrived.places, 0.0)
    for head in arrived.before.double():
        importance = []
        for j in arrived.text:
            outgoing = sum(float(head[j, i]) for i in arrived.text)
            incoming = sum(float(head[i, j]) for i in arrived.text)
            importance.append(outgoing + incoming - float(head[j, j]))
        mean = sum(importance) / len(importance)
        for j, value in zip(arrived.text, importance, strict=True):
            for i in arrived.places:
                score[i] += (dynamic * value + (1 - dynamic) * mean) * float(head[j, i])
    return sorted(arrived.places, key=lambda i: (-score[i], i))[: arrived.keep]


ROWS = {
    "adaptinfer": Cuts(
        naive=naive,
        tried=({"dynamic": 1.0}, {"dynamic": 0.4}),
        refused=({"dynamic": 1.5}, {"dynamic": "1"}, {"layers": (1, 2, 2)}),
        layers=(1, 2, 3),
    )
}
