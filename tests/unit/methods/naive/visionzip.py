# SPDX-License-Identifier: Apache-2.0
"""visionzip: a loop written from its description."""

from __future__ import annotations

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of


def naive(tokens: VisualTokens, image: int, context: float = 10 / 64) -> tuple[list[int], list[int], dict[int, int]]:
    """Dominant tokens, contextual ones, and which of these each other token joins."""
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].double().sum(0).tolist()
    heads = tokens.encoder_attention(-1).shape[1]
    keys = tokens.encoder_keys(-1)[image].double().unflatten(-1, (heads, -1)).mean(1)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    dominant, contextual, into = [], [], {}
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        few = min(int(number * context + 0.5), max(number - 1, 0))
        first = best(tile, score, number - few)
        rest = [i for i in tile if i not in first]
        step = max(1, len(rest) // max(few, 1))
        targets = rest[::step][:few]
        for i in rest:
            if i not in targets and targets:
                into[i] = max(targets, key=lambda j: (round(float(keys[i] @ keys[j]), 6), -j))
        dominant, contextual = dominant + first, contextual + targets
    left = tokens.keep[image] - len(dominant) - len(contextual)
    return sorted(dominant + others[:left]), contextual, into


def kept_and_joined(tokens: VisualTokens, image: int, **options: float) -> tuple[list[int], dict[int, int]]:
    dominant, contextual, into = naive(tokens, image, **options)
    return sorted(dominant + contextual), into


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
