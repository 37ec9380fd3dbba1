# SPDX-License-Identifier: Apache-2.0
"""sinkpruner: a loop written from its description."""

from __future__ import annotations

from typing import Any

from method_rows import Cuts
from several_cuts import Arrived


def naive(seen: Arrived, decoder: Any, sinks: float) -> list[int]:
    """Cuts inside go by the text."""
    if seen.number == 0:
        return seen.stays
    heads = range(len(seen.before))
    score = {i: sum(float(seen.before[h, j, i]) for h in heads for j in seen.text) for i in seen.places}
    return sorted(seen.places, key=lambda i: (-score[i], i))[: seen.keep]


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
