# SPDX-License-Identifier: Apache-2.0
"""Naive loops of PruMerge and PruMerge+ (arXiv 2403.15388)."""

from __future__ import annotations

import numpy as np

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of

BOTH = ("prumerge", "prumerge_plus")


def picks(tile: list[int], score: list[float], num_kept: int, plus: bool) -> list[int]:
    """Return the top tokens, or a quarter of them and evenly spaced others for PruMerge+."""
    if not plus:
        return best(tile, score, num_kept)
    first = best(tile, score, max(1, (num_kept + 2) // 4)) if num_kept else []
    rest, num_spaced = [i for i in tile if i not in first], num_kept - len(first)
    return first + [rest[j * len(rest) // num_spaced] for j in range(num_spaced)]


def outliers(tile: list[int], score: list[float]) -> int:
    """Count the scores above Q3 + 1.5 (Q3 - Q1)."""
    values = np.array([score[i] for i in tile])
    first, third = np.percentile(values, [25, 75])
    return int((values > third + 1.5 * (third - first)).sum())


def adaptive(tile: list[int], score: list[float], plus: bool) -> list[int]:
    num_outliers = outliers(tile, score)
    first = best(tile, score, num_outliers)
    if plus and num_outliers:
        step = max(1, int(int(len(tile) / num_outliers) / 3))
        first += [tile[p] for p in range(0, len(tile) - 1, step) if tile[p] not in first]
    return first


def naive(tokens: VisualTokens, image: int, name: str, merge: str = "rest", exact: bool = True) -> tuple[list, dict]:
    """Return the kept tokens and the target of each merged token."""
    tiles, untiled = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    keys = tokens.encoder_keys(-1)[image].double()
    keys = keys / keys.norm(dim=-1, keepdim=True)
    similarity = (keys @ keys.T).mul(1e6).round().tolist()
    kept, targets, plus = [], {}, name == "prumerge_plus"
    for tile, num_kept in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        if exact:
            has_merge_target = merge == "rest" and 0 < num_kept < len(tile)
            kept_of_tile = picks(tile, score, num_kept - has_merge_target, plus)
        else:
            kept_of_tile = adaptive(tile, score, plus)
            has_merge_target = len(kept_of_tile) < len(tile) and (merge == "rest" or not kept_of_tile)
        rest = [i for i in tile if i not in kept_of_tile]
        merge_target = best(rest, score, 1) if has_merge_target else []
        kept_of_tile += merge_target
        for i in rest:
            if i in merge_target:
                continue
            if merge == "rest" and merge_target:
                targets[i] = merge_target[0]
            if merge == "clusters":
                neighbors = [
                    j
                    for j in kept_of_tile
                    if i in sorted((m for m in tile if m != j), key=lambda m: -similarity[j][m])[:32]
                ]
                if neighbors:
                    targets[i] = max(neighbors, key=lambda j: (similarity[i][j], -j))
        kept += kept_of_tile
    return sorted(kept + (untiled[: tokens.keep[image] - len(kept)] if exact else [])), targets


def row(name: str) -> Tower:
    def loop(tokens: VisualTokens, image: int, merge: str = "rest") -> tuple[list[int], dict[int, int] | None]:
        kept, targets = naive(tokens, image, name, merge)
        return kept, None if merge == "none" else targets

    return Tower(
        naive=loop,
        tried=({}, {"merge": "clusters"}, {"merge": "none"}),
        tied=({}, {"merge": "none"}),
        papers=(((24, 24), 144),),
        refused=({"merge": "all"}, {"neighbours": 0}, {"exact": 1}),
        unchanged=("length of keys", "order of heads"),
        merges=True,
    )


ROWS = {name: row(name) for name in BOTH}
