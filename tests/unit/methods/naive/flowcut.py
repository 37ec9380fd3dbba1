# SPDX-License-Identifier: Apache-2.0
"""Naive loop of FlowCut (arXiv 2505.19536)."""

from __future__ import annotations

import math
from typing import Any

import torch

import tokenprune
from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of, tower_tokens

LAYERS = tokenprune.method("flowcut").encoder_layers


def tokens_of(layout: Any, keep: list[int], seed: int = 0, power: int = 1, dtype=torch.float32) -> VisualTokens:
    """Build tokens with random flow statistics. A larger `power` sharpens the attention."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(sum(h * w for h, w in tiles) + newlines for tiles, newlines in layout)
    flow = {layer: torch.rand(len(layout), 3, longest, generator=generator) ** power for layer in LAYERS}
    return tower_tokens(layout, keep, encoder_flow={layer: values.to(dtype) for layer, values in flow.items()})


def naive_tile(flow: dict[float, list[list[float]]], tile: list[int], num_kept: int) -> list[int]:
    """Return the kept patches of a tile.

    Each block adds (rel / sum rel + sem / sum sem) * ||v||_1 to a running mean of scores, and every second block drops
    patches at a rate that depends on the entropy of the attention.
    """
    survivors, score = list(tile), dict.fromkeys(tile, 0.0)
    for block, layer in enumerate(LAYERS):
        attention, semantic, norm = flow[layer]
        attention_sum, semantic_sum = sum(attention[i] for i in survivors), sum(semantic[i] for i in survivors)
        for i in survivors:
            block_score = (attention[i] / attention_sum + semantic[i] / semantic_sum) * norm[i]
            score[i] = block_score if block == 0 else 0.5 * score[i] + 0.5 * block_score
        remaining = 21 - block
        if remaining == 0:
            survivors = best(survivors, score, num_kept)
        elif remaining % 2 == 0:
            entropy = -sum(p * math.log(p) for p in (attention[i] / attention_sum for i in survivors) if p)
            sharpness = 1 - (entropy / math.log(max(len(survivors), 2))) ** 2
            num_dropped = round((len(survivors) - num_kept) / math.sqrt(remaining) * sharpness)
            survivors = best(survivors, score, max(len(survivors) - num_dropped, num_kept))
    return survivors


def naive(tokens: VisualTokens, image: int) -> list[int]:
    flow = {layer: tokens.encoder_flow(layer)[image].double().tolist() for layer in LAYERS}
    tiles, untiled = tiles_of(tokens, image)
    budgets = parts([len(tile) for tile in tiles], tokens.keep[image])
    kept = [i for tile, num_kept in zip(tiles, budgets, strict=True) for i in naive_tile(flow, tile, num_kept)]
    return sorted(kept + untiled[: tokens.keep[image] - len(kept)])


def made(layout: Any, keep: list[int], seed: int = 0, ties: bool = False, **options: Any) -> VisualTokens:
    """Build tokens with sharp attention instead of ties."""
    return tokens_of(layout, keep, seed, power=12 if ties else 1, **options)


ROWS = {"flowcut": Tower(naive=naive, made=made)}
