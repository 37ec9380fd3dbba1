# SPDX-License-Identifier: Apache-2.0
"""ivc_prune: a loop written from its description."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best


def naive_choice(
    cos: list[float], sin: list[float], visual: Tensor, text: Tensor, keep: int, coordinates: float = 0.05
) -> list[int]:
    """cos, sin: means over a token's angles. visual, text: values `[n, Hkv, D]` of the image, and behind it."""
    count, heads, width = visual.shape
    everything = torch.cat([visual, text]).double()

    def likeness(row: Tensor) -> list[float]:
        total = [0.0] * count
        for h in range(heads):
            share = (everything[:, h] @ row[h].double() / width**0.5).softmax(0)
            total = [one + float(share[i]) / heads for i, one in enumerate(total)]
        return total

    each = min(round(coordinates * count), keep // 4)
    anchors = set(best(cos, each)) | set(best(sin, each))
    of_text = [likeness(row) for row in (text[2:] if len(text) > 2 else text)]  # the first two rate nothing
    from_text = [sum(row[i] for row in of_text) for i in range(count)]
    seeds = best(from_text, max(1, round(0.01 * count)))
    from_seeds = [likeness(visual[i]) for i in seeds]
    score = [from_text[i] + sum(row[i] for row in from_seeds) for i in range(count)]
    rank = {i: (0 if i in anchors else 1 if i in seeds else 2, -score[i], i) for i in range(count)}
    return sorted(sorted(range(count), key=rank.__getitem__)[:keep])


def naive(seen: Arrived, decoder: Any, coordinates: float) -> list[int]:
    """By coordinates, seeds, and what is like the question."""
    places = torch.arange(len(seen.hidden))[None]
    cos, sin = (one[0].mean(1) for one in decoder.rotary_emb(seen.hidden[None], places))
    kept = naive_choice(
        cos[seen.places].tolist(), sin[seen.places].tolist(), seen.values[seen.places], seen.values[seen.text],
        seen.keep, coordinates,
    )  # fmt: skip
    return [seen.places[i] for i in kept]


ROWS = {
    "ivc_prune": Cuts(
        naive=naive,
        keep=0.4,
        tried=({"coordinates": 0.05}, {"coordinates": 0.2}),
        refused=({"layer": 0}, {"coordinates": 0.6}, {"coordinates": -1}, {"layer": 2.5}),
        layers=(2,),
    )
}
