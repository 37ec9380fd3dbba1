# SPDX-License-Identifier: Apache-2.0
"""vispruner: a loop written from its description."""

from __future__ import annotations

from typing import Any

import torch

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import parts, tiles_of, tower_tokens


def naive(tokens: VisualTokens, image: int, important: float = 0.5, features: str = "tower") -> list[int]:
    tiles, others = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    x = (tokens.encoder_features if features == "tower" else tokens.hidden)[image].double()
    x = x / x.norm(dim=-1, keepdim=True)
    alike = (x @ x.T).tolist()
    kept = []
    for tile, number in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        line = sorted(tile, key=lambda i: (-score[i], i))
        few = int(number * important)
        kept, line, goal = kept + line[:few], line[few:], number - few
        while goal and len(line) > goal:
            odd, even = line[0::2], line[1::2]
            drop = min(8, len(odd), len(line) - goal)
            odd.sort(key=lambda i: -max((alike[i][j] for j in even), default=-2))  # a stable sort
            line = odd[drop:] + even
        kept += line if goal else []
    return sorted(kept + others[: tokens.keep[image] - len(kept)])


def exact(layout: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Features of length 1 whose cosines are multiples of 1/32: many are equal, and none is rounded."""
    longest = max(sum(h * w for h, w in tiles) + newlines for tiles, newlines in layout)
    g = torch.Generator().manual_seed(seed)
    names = ("encoder_features", "hidden")
    return {name: torch.randn(len(layout), longest, 64, generator=g).sign() / 8 for name in names}


def made(
    layout: Any, keep: list[int], seed: int = 0, ties: bool = False, dtype: torch.dtype = torch.float32, **given: Any
) -> VisualTokens:
    if ties or dtype == torch.bfloat16:
        given = {name: x.to(dtype) for name, x in exact(layout, seed).items()} | given
    return tower_tokens(layout, keep, seed=seed, ties=ties, dtype=dtype, **given)


ROWS = {
    "vispruner": Tower(
        naive=naive,
        made=made,
        tried=[{"important": share, "features": of} for share in (0.5, 0.75, 0.0) for of in ("tower", "projected")],
        papers=(((24, 24), 64), ((24, 24), 127)),
        refused=({"important": 1.5}, {"features": "clip"}),
        unchanged=("length of features", "turn of features", "unit of attention", "tokens"),
    )
}
