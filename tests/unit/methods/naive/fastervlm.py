# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FasterVLM (arXiv 2412.01818): a sort by attention."""

from __future__ import annotations

import torch

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of


def naive(tokens: VisualTokens, image: int) -> list[int]:
    """Keep the tokens with the highest class-token attention in each tile."""
    tiles, untiled = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].double().mean(0).nan_to_num(nan=-torch.inf).tolist()
    budgets = parts([len(tile) for tile in tiles], tokens.keep[image])
    kept = [i for tile, num_kept in zip(tiles, budgets, strict=True) for i in best(tile, score, num_kept)]
    return sorted(kept + untiled[: tokens.keep[image] - len(kept)])


ROWS = {
    "fastervlm": Tower(
        naive=naive,
        papers=(((24, 24), 29), ((24, 24), 288), ((48, 60), 320), ((48, 60), 1000)),
        unchanged=("unit of attention", "order of heads", "tokens"),
    )
}
