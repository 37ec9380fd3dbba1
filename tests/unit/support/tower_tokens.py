# SPDX-License-Identifier: Apache-2.0
"""Synthetic visual tokens with all tower observables: tiles, newlines, padding, ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import tokenprune
from tokenprune import Selection
from tokenprune.selection.segments import Patches
from tokenprune.selection.tokens import VisualTokens
from tokenprune.testing import visual_tokens

# For each image, the (height, width) of its tiles and the number of newlines after them.
Layout = Sequence[tuple[Sequence[tuple[int, int]], int]]

# One tile; tiles of different sizes with newlines and padding; a single row, a single column, a single token.
LAYOUTS: list[Layout] = [
    [([(8, 8)], 0)],
    [([(6, 5), (4, 7), (3, 3)], 3), ([(5, 5)], 0)],
    [([(1, 19)], 0), ([(13, 1)], 2), ([(1, 1)], 0)],
]


def tower_tokens(
    layout: Layout, keep: Sequence[int], *, layers: Sequence[Any] = (-1,), seed: int = 0, heads: int = 4,
    width: int = 16, ties: bool = False, dtype: torch.dtype = torch.float32, **replaced: Any,
) -> VisualTokens:  # fmt: skip
    """Return one image per row. `ties` draws few distinct scores and vectors. `replaced`: given observables."""
    g = torch.Generator().manual_seed(seed)
    cells = [
        [(t, r, c, h, w, 1) for t, (h, w) in enumerate(tiles) for r in range(h) for c in range(w)]
        + [(-1, 0, 0, 1, 1, 1)] * newlines
        for tiles, newlines in layout
    ]
    counts = [len(image_cells) for image_cells in cells]
    longest, rows = max(counts), len(counts)
    filled = [image_cells + [(-1, 0, 0, 1, 1, 1)] * (longest - len(image_cells)) for image_cells in cells]
    fields = torch.tensor(filled).permute(2, 0, 1)
    patches = Patches(*fields, tiles=max(len(tiles) for tiles, _ in layout))
    in_patch = patches.tile >= 0

    def scores() -> Tensor:
        values = torch.rand(rows, heads, longest, generator=g)
        values = (values * 3).floor() / 4 if ties else values
        return values.masked_fill(~in_patch[:, None], 0).to(dtype)

    def vectors() -> Tensor:
        values = torch.randn(rows, longest, width, generator=g)
        return (values[:, torch.randint(min(7, longest), (longest,), generator=g)] if ties else values).to(dtype)

    observables = {
        "encoder_attention": {layer: scores() for layer in layers},
        "encoder_received_attention": {layer: scores() for layer in layers},
        "encoder_keys": {layer: vectors() for layer in layers},
        "encoder_features": vectors(),
        "patches": patches,
    } | replaced  # fmt: skip
    hidden = observables.pop("hidden", None)
    return visual_tokens(vectors() if hidden is None else hidden, counts, keep=list(keep), **observables)


def tiles_of(tokens: VisualTokens, image: int) -> tuple[list[list[int]], list[int]]:
    """Return the tokens of each tile of an image in order, and the tokens outside of patches."""
    tile = tokens.patches.tile[image, : tokens.counts[image]].tolist()
    return [[i for i, tile_index in enumerate(tile) if tile_index == t] for t in sorted(set(tile) - {-1})], [
        i for i, tile_index in enumerate(tile) if tile_index < 0
    ]


def parts(sizes: list[int], total: int) -> list[int]:
    """Split a budget among tiles in proportion with caps; remainders go to the largest fractions, earlier tiles
    first."""
    total = min(total, sum(sizes))
    shares = [total * size // sum(sizes) for size in sizes]
    order = sorted(range(len(sizes)), key=lambda t: (-(total * sizes[t] % sum(sizes)), t))
    return [n + (order.index(t) < total - sum(shares)) for t, n in enumerate(shares)]


def best(indices: list[int], score: Sequence[float], count: int) -> list[int]:
    return sorted(sorted(indices, key=lambda i: (-score[i], i))[:count])


def kept_of(keep: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in keep]


def chosen(name: str, tokens: VisualTokens, **options: Any) -> list[list[int]]:
    """Return the kept tokens of each image."""
    return kept_of(tokenprune.method(name, **options).select(tokens).keep)


def merged(tokens: VisualTokens, selection: Selection) -> Tensor:
    """Return the tokens after merging, shape (segments, tokens, channels)."""
    slots = tokens.segments.position + torch.arange(len(tokens.counts))[:, None] * tokens.mask.shape[1]
    return selection.apply(tokens.hidden, slots, tokens.mask)


def budgets(layout: Layout, shares: Sequence[float] = (0.01, 0.1, 0.34, 0.75, 1.0)) -> list[list[int]]:
    counts = [sum(h * w for h, w in tiles) + newlines for tiles, newlines in layout]
    return [[max(1, int(share * count)) for count in counts] for share in shares]
