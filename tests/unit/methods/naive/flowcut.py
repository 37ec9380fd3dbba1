# SPDX-License-Identifier: Apache-2.0
"""flowcut: a loop written from its description."""

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
    """power: the larger, the sharper the attention."""
    g = torch.Generator().manual_seed(seed)
    longest = max(sum(h * w for h, w in tiles) + newlines for tiles, newlines in layout)
    flow = {layer: torch.rand(len(layout), 3, longest, generator=g) ** power for layer in LAYERS}
    return tower_tokens(layout, keep, encoder_flow={layer: one.to(dtype) for layer, one in flow.items()})


def naive_tile(flow: dict[float, list[list[float]]], tile: list[int], number: int) -> list[int]:
    """Steps 1 to 3 of the description: the kept patches."""
    left, score = list(tile), dict.fromkeys(tile, 0.0)
    for block, layer in enumerate(LAYERS):
        attention, alike, size = flow[layer]
        mass, likeness = sum(attention[i] for i in left), sum(alike[i] for i in left)
        for i in left:
            now = (attention[i] / mass + alike[i] / likeness) * size[i]
            score[i] = now if block == 0 else 0.5 * score[i] + 0.5 * now
        remaining = 21 - block
        if remaining == 0:
            left = best(left, score, number)
        elif remaining % 2 == 0:
            entropy = -sum(p * math.log(p) for p in (attention[i] / mass for i in left) if p)
            sharp = 1 - (entropy / math.log(max(len(left), 2))) ** 2
            gone = round((len(left) - number) / math.sqrt(remaining) * sharp)
            left = best(left, score, max(len(left) - gone, number))
    return left


def naive(tokens: VisualTokens, image: int) -> list[int]:
    flow = {layer: tokens.encoder_flow(layer)[image].double().tolist() for layer in LAYERS}
    tiles, others = tiles_of(tokens, image)
    numbers = parts([len(tile) for tile in tiles], tokens.keep[image])
    kept = [i for tile, number in zip(tiles, numbers, strict=True) for i in naive_tile(flow, tile, number)]
    return sorted(kept + others[: tokens.keep[image] - len(kept)])


def made(layout: Any, keep: list[int], seed: int = 0, ties: bool = False, **given: Any) -> VisualTokens:
    """Not of few values, but of sharp attention."""
    return tokens_of(layout, keep, seed, power=12 if ties else 1, **given)


ROWS = {"flowcut": Tower(naive=naive, made=made)}
