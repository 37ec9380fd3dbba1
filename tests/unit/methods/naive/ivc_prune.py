# SPDX-License-Identifier: Apache-2.0
"""Naive loop of IVC-Prune (arXiv 2602.03060)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from method_rows import Cuts
from several_cuts import Arrived, best


def naive_choice(
    cos: list[float], sin: list[float], visual: Tensor, text: Tensor, keep: int, coordinates: float = 0.05
) -> list[int]:
    """Keep coordinate anchors, then semantic seeds, then the tokens rated highest by the text and the seeds.

    cos, sin: means over the rotary angles of each token. visual, text: values `[n, Hkv, D]` of the image and the
    text after it.
    """
    count, heads, width = visual.shape
    values = torch.cat([visual, text]).double()

    def rate(row: Tensor) -> list[float]:
        total = [0.0] * count
        for h in range(heads):
            share = (values[:, h] @ row[h].double() / width**0.5).softmax(0)
            total = [value + float(share[i]) / heads for i, value in enumerate(total)]
        return total

    num_anchors = min(round(coordinates * count), keep // 4)
    anchors = set(best(cos, num_anchors)) | set(best(sin, num_anchors))
    # The first two text tokens are not raters.
    text_ratings = [rate(row) for row in (text[2:] if len(text) > 2 else text)]
    from_text = [sum(row[i] for row in text_ratings) for i in range(count)]
    seeds = best(from_text, max(1, round(0.01 * count)))
    from_seeds = [rate(visual[i]) for i in seeds]
    score = [from_text[i] + sum(row[i] for row in from_seeds) for i in range(count)]
    rank = {i: (0 if i in anchors else 1 if i in seeds else 2, -score[i], i) for i in range(count)}
    return sorted(sorted(range(count), key=rank.__getitem__)[:keep])


def naive(arrived: Arrived, decoder: Any, coordinates: float) -> list[int]:
    """Apply `naive_choice` to the values and rotary angles of a decoder layer."""
    positions = torch.arange(len(arrived.hidden))[None]
    cos, sin = (angles[0].mean(1) for angles in decoder.rotary_emb(arrived.hidden[None], positions))
    kept = naive_choice(
        cos[arrived.places].tolist(), sin[arrived.places].tolist(), arrived.values[arrived.places],
        arrived.values[arrived.text], arrived.keep, coordinates,
    )  # fmt: skip
    return [arrived.places[i] for i in kept]


ROWS = {
    "ivc_prune": Cuts(
        naive=naive,
        keep=0.4,
        tried=({"coordinates": 0.05}, {"coordinates": 0.2}),
        refused=({"layer": 0}, {"coordinates": 0.6}, {"coordinates": -1}, {"layer": 2.5}),
        layers=(2,),
    )
}
