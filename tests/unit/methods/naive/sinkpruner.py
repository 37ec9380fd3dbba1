# SPDX-License-Identifier: Apache-2.0
"""Naive loop of SinkPruner (arXiv 2609.01004)."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived


def naive(arrived: Arrived, decoder: Any, sinks: float) -> list[int]:
    """Rank by the attention of all text rows. The first cut happens before the decoder and is not checked."""
    if arrived.number == 0:
        return arrived.stays
    heads = range(len(arrived.before))
    score = {i: sum(float(arrived.before[h, j, i]) for h in heads for j in arrived.text) for i in arrived.places}
    return sorted(arrived.places, key=lambda i: (-score[i], i))[: arrived.keep]


ROWS = {
    "sinkpruner": Cuts(
        naive=naive,
        keep=0.3,
        tried=({"sinks": 0.2},),
        refused=({"sinks": 0.7}, {"sinks": -0.1}, {"stage2": 1}),
        layers=(0, 1, 2, 3),
        merges=True,
    )
}
