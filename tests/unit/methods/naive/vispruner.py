# SPDX-License-Identifier: Apache-2.0
"""Naive loop of VisPruner (arXiv 2412.01818)."""

from __future__ import annotations

from typing import Any

import torch

from method_rows import Tower
from tokenprune.selection.tokens import VisualTokens
from tower_tokens import parts, tiles_of, tower_tokens


def naive(tokens: VisualTokens, image: int, important: float = 0.5, features: str = "tower") -> list[int]:
    """Keep the top attention, then remove the most similar of the other tokens in rounds of 8."""
    tiles, untiled = tiles_of(tokens, image)
    score = tokens.encoder_attention(-1)[image].float().mean(0).tolist()
    x = (tokens.encoder_features if features == "tower" else tokens.hidden)[image].double()
    x = x / x.norm(dim=-1, keepdim=True)
    similarity = (x @ x.T).tolist()
    kept = []
    for tile, num_kept in zip(tiles, parts([len(t) for t in tiles], tokens.keep[image]), strict=True):
        candidates = sorted(tile, key=lambda i: (-score[i], i))
        num_important = int(num_kept * important)
        kept, candidates, num_diverse = (
            kept + candidates[:num_important],
            candidates[num_important:],
            num_kept - num_important,
        )
        while num_diverse and len(candidates) > num_diverse:
            odd, even = candidates[0::2], candidates[1::2]
            drop = min(8, len(odd), len(candidates) - num_diverse)
            odd.sort(key=lambda i: -max((similarity[i][j] for j in even), default=-2))  # a stable sort
            candidates = odd[drop:] + even
        kept += candidates if num_diverse else []
    return sorted(kept + untiled[: tokens.keep[image] - len(kept)])


def exact(layout: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return unit features whose cosines are multiples of 1/32, so that many are equal and exact in float32."""
    longest = max(sum(h * w for h, w in tiles) + newlines for tiles, newlines in layout)
    generator = torch.Generator().manual_seed(seed)
    names = ("encoder_features", "hidden")
    return {name: torch.randn(len(layout), longest, 64, generator=generator).sign() / 8 for name in names}


def made(
    layout: Any,
    keep: list[int],
    seed: int = 0,
    ties: bool = False,
    dtype: torch.dtype = torch.float32,
    **observables: Any,
) -> VisualTokens:
    if ties or dtype == torch.bfloat16:
        observables = {name: x.to(dtype) for name, x in exact(layout, seed).items()} | observables
    return tower_tokens(layout, keep, seed=seed, ties=ties, dtype=dtype, **observables)


ROWS = {
    "vispruner": Tower(
        naive=naive,
        made=made,
        tried=[{"important": share, "features": name} for share in (0.5, 0.75, 0.0) for name in ("tower", "projected")],
        papers=(((24, 24), 64), ((24, 24), 127)),
        refused=({"important": 1.5}, {"features": "clip"}),
        unchanged=("length of features", "turn of features", "unit of attention", "tokens"),
    )
}
