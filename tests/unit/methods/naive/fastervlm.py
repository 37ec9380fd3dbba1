# SPDX-License-Identifier: Apache-2.0
"""fastervlm: a sort."""

from __future__ import annotations

import torch

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of


def naive(tokens: VisualTokens, image: int) -> list[int]:
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].double().mean(0).nan_to_num(nan=-torch.inf).tolist()
    numbers = parts([len(tile) for tile in tiles], tokens.keep[image])
    kept = [i for tile, number in zip(tiles, numbers, strict=True) for i in best(tile, score, number)]
    return sorted(kept + others[: tokens.keep[image] - len(kept)])


ROWS = {
    "fastervlm": Tower(
        naive=naive,
        papers=(((24, 24), 29), ((24, 24), 288), ((48, 60), 320), ((48, 60), 1000)),
        unchanged=("unit of attention", "order of heads", "tokens"),
    )
}
