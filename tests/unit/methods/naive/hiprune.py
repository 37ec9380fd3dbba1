# SPDX-License-Identifier: Apache-2.0
"""hiprune: a loop written from its description."""

from __future__ import annotations

from functools import partial

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of, tower_tokens

LAYERS = (0.39, -1)


def naive(tokens: VisualTokens, image: int, alpha: float = 0.1, edges: str = "grid") -> list[int]:
    tiles, others = tiles_of(tokens, image)
    objects, deep = (tokens.encoder_received_attention(x)[image].double().mean(0).tolist() for x in LAYERS)
    patches, kept = tokens.patches, []
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        height, width = int(patches.height[image, tile[0]]), int(patches.width[image, tile[0]])
        first = set()
        for anchor in best(tile, objects, min(round(number * alpha / 5), number // 5)):
            first.add(anchor)
            place = anchor - tile[0]
            row, column = divmod(place, width)
            if edges == "sequence":
                beside = (place - 1, place + 1, place - width, place + width)
                first |= {tile[min(max(i, 0), len(tile) - 1)] for i in beside}
            else:
                cross = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
                first |= {tile[r * width + c] for r, c in cross if 0 <= r < height and 0 <= c < width}
        kept += [*first, *best([i for i in tile if i not in first], deep, number - len(first))]
    return sorted(kept + others[: tokens.keep[image] - len(kept)])


ROWS = {
    "hiprune": Tower(
        naive=naive,
        made=partial(tower_tokens, layers=LAYERS),
        tried=[{"alpha": alpha, "edges": edges} for alpha in (0.1, 0.5, 1.0) for edges in ("grid", "sequence")],
        papers=(((24, 24), 64), ((24, 24), 192), ((48, 60), 320)),
        refused=({"alpha": 1.1}, {"object_layer": 1.0}, {"edges": "wrap"}),
        unchanged=("tokens",),
    )
}
