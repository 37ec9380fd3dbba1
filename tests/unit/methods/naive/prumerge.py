# SPDX-License-Identifier: Apache-2.0
"""prumerge and prumerge_plus: loops written from their description."""

from __future__ import annotations

import numpy as np

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import best, parts, tiles_of

BOTH = ("prumerge", "prumerge_plus")


def picks(tile: list[int], score: list[float], number: int, plus: bool) -> list[int]:
    if not plus:
        return best(tile, score, number)
    first = best(tile, score, max(1, (number + 2) // 4)) if number else []
    rest, wanted = [i for i in tile if i not in first], number - len(first)
    return first + [rest[j * len(rest) // wanted] for j in range(wanted)]


def outliers(tile: list[int], score: list[float]) -> int:
    values = np.array([score[i] for i in tile])
    first, third = np.percentile(values, [25, 75])
    return int((values > third + 1.5 * (third - first)).sum())


def adaptive(tile: list[int], score: list[float], plus: bool) -> list[int]:
    number = outliers(tile, score)
    first = best(tile, score, number)
    if plus and number:
        step = max(1, int(int(len(tile) / number) / 3))
        first += [tile[p] for p in range(0, len(tile) - 1, step) if tile[p] not in first]
    return first


def naive(tokens: VisualTokens, image: int, name: str, merge: str = "rest", exact: bool = True) -> tuple[list, dict]:
    """Kept tokens, and of each dropped one that joins another, which."""
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    keys = tokens.encoder_keys(-1)[image].double()
    keys = keys / keys.norm(dim=-1, keepdim=True)
    alike = (keys @ keys.T).mul(1e6).round().tolist()
    kept, into, plus = [], {}, name == "prumerge_plus"
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        if exact:
            extra = merge == "rest" and 0 < number < len(tile)
            own = picks(tile, score, number - extra, plus)
        else:
            own = adaptive(tile, score, plus)
            extra = len(own) < len(tile) and (merge == "rest" or not own)
        rest = [i for i in tile if i not in own]
        slot = best(rest, score, 1) if extra else []
        own += slot
        for i in rest:
            if i in slot:
                continue
            if merge == "rest" and slot:
                into[i] = slot[0]
            if merge == "clusters":
                near = [j for j in own if i in sorted((m for m in tile if m != j), key=lambda m: -alike[j][m])[:32]]
                if near:
                    into[i] = max(near, key=lambda j: (alike[i][j], -j))
        kept += own
    return sorted(kept + (others[: tokens.keep[image] - len(kept)] if exact else [])), into


def row(name: str) -> Tower:
    def loop(tokens: VisualTokens, image: int, merge: str = "rest") -> tuple[list[int], dict[int, int] | None]:
        kept, into = naive(tokens, image, name, merge)
        return kept, None if merge == "none" else into

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
