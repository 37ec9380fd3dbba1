# SPDX-License-Identifier: Apache-2.0
"""Naive loop of HiPrune (arXiv 2508.00553)."""

from __future__ import annotations

from functools import partial

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of, tower_tokens

LAYERS = (0.39, -1)


def naive(tokens: VisualTokens, image: int, alpha: float = 0.1, edges: str = "grid") -> list[int]:
    """Keep anchors of the object layer with their neighbors (buffers), then registers of the deep layer."""
    tiles, untiled = tiles_of(tokens, image)
    object_score, deep_score = (tokens.encoder_received_attention(x)[image].double().mean(0).tolist() for x in LAYERS)
    patches, kept = tokens.patches, []
    for tile, num_kept in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        height, width = int(patches.height[image, tile[0]]), int(patches.width[image, tile[0]])
        anchors_and_buffers = set()
        for anchor in best(tile, object_score, min(round(num_kept * alpha / 5), num_kept // 5)):
            anchors_and_buffers.add(anchor)
            cell = anchor - tile[0]
            row, column = divmod(cell, width)
            if edges == "sequence":
                neighbors = (cell - 1, cell + 1, cell - width, cell + width)
                anchors_and_buffers |= {tile[min(max(i, 0), len(tile) - 1)] for i in neighbors}
            else:
                cross = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
                anchors_and_buffers |= {tile[r * width + c] for r, c in cross if 0 <= r < height and 0 <= c < width}
        kept += [
            *anchors_and_buffers,
            *best([i for i in tile if i not in anchors_and_buffers], deep_score, num_kept - len(anchors_and_buffers)),
        ]
    return sorted(kept + untiled[: tokens.keep[image] - len(kept)])


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
