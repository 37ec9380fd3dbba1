# SPDX-License-Identifier: Apache-2.0
"""Naive loop of VisionZip (arXiv 2412.04467)."""

from __future__ import annotations

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of


def naive(tokens: VisualTokens, image: int, context: float = 10 / 64) -> tuple[list[int], list[int], dict[int, int]]:
    """Return the dominant tokens, the contextual tokens, and the contextual target of each other token."""
    tiles, untiled = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].double().sum(0).tolist()
    heads = tokens.encoder_attention(-1).shape[1]
    keys = tokens.encoder_keys(-1)[image].double().unflatten(-1, (heads, -1)).mean(1)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    dominant, contextual, targets = [], [], {}
    for tile, num_kept in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        num_contextual = min(int(num_kept * context + 0.5), max(num_kept - 1, 0))
        dominant_of_tile = best(tile, score, num_kept - num_contextual)
        rest = [i for i in tile if i not in dominant_of_tile]
        step = max(1, len(rest) // max(num_contextual, 1))
        tile_targets = rest[::step][:num_contextual]
        for i in rest:
            if i not in tile_targets and tile_targets:
                targets[i] = max(tile_targets, key=lambda j: (round(float(keys[i] @ keys[j]), 6), -j))
        dominant, contextual = dominant + dominant_of_tile, contextual + tile_targets
    num_left = tokens.keep[image] - len(dominant) - len(contextual)
    return sorted(dominant + untiled[:num_left]), contextual, targets


def kept_and_joined(tokens: VisualTokens, image: int, **options: float) -> tuple[list[int], dict[int, int]]:
    dominant, contextual, targets = naive(tokens, image, **options)
    return sorted(dominant + contextual), targets


ROWS = {
    "visionzip": Tower(
        naive=kept_and_joined,
        tried=({}, {"context": 0.0}, {"context": 0.5}),
        papers=(((24, 24), 64), ((24, 24), 192), ((48, 60), 320)),
        refused=({"context": 1.0}, {"context": -0.1}, {"centre": 0}, {"centre": "half"}),
        unchanged=("length of keys", "order of heads", "tokens"),
        merges=True,
    )
}
