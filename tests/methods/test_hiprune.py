# SPDX-License-Identifier: Apache-2.0
"""hiprune against a loop written from its description; numbers are those of the description's invariants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokenprune
from tokenprune import OptionError
from tokenprune.integrations.shared.tower_scores import block_index
from tokenprune.view.tokens import VisualTokens
from tower_tokens import LAYOUTS, best, budgets, kept_of, parts, tiles_of, tower_tokens

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


def chosen(tokens: VisualTokens, **options: Any) -> list[list[int]]:
    return kept_of(tokenprune.method("hiprune", **options).select(tokens).keep)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "tiles", "thin"])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_loop(layout: Any, ties: bool) -> None:
    """1, 2, 4, 6, 7: exactly the budget on every grid; anchors, their real neighbours, and the best of the others."""
    for number, keep in enumerate(budgets(layout)):
        tokens = tower_tokens(layout, keep, seed=number, ties=ties, layers=LAYERS)
        for alpha in (0.1, 0.5, 1.0):
            for edges in ("grid", "sequence"):
                want = [naive(tokens, image, alpha, edges) for image in range(len(keep))]
                assert chosen(tokens, alpha=alpha, edges=edges) == want


@pytest.mark.parametrize(("grid", "keep"), [((24, 24), 64), ((24, 24), 192), ((48, 60), 320)])
def test_papers_sizes_in_bfloat16(grid: tuple[int, int], keep: int) -> None:
    tokens = tower_tokens([([grid], 0)], [keep], layers=LAYERS, dtype=torch.bfloat16)
    assert chosen(tokens) == [naive(tokens, 0)]


def test_without_anchors_the_last_block_decides() -> None:
    """3: alpha of 0, or a budget too small for a cross."""
    for keep, alpha in ((20, 0.0), (4, 1.0), (24, 0.1)):
        tokens = tower_tokens([([(6, 6)], 0)], [keep], layers=LAYERS)
        deep = tokens.encoder_received_attention(-1)[0].double().mean(0).tolist()
        assert chosen(tokens, alpha=alpha) == [best(list(range(36)), deep, keep)]


def test_an_anchor_in_a_corner() -> None:
    """6: of a 5 x 6 grid; the sets of the authors' code are those that its description gives."""
    for anchor, edges, want in (
        (5, "grid", {4, 5, 11}), (23, "grid", {17, 22, 23, 29}),
        (5, "sequence", {0, 4, 5, 6, 11}), (23, "sequence", {17, 22, 23, 24, 29}),
    ):  # fmt: skip
        scores = {layer: torch.zeros(1, 1, 30) for layer in LAYERS}
        scores[0.39][0, 0, anchor] = 1
        scores[-1][0, 0, 12:16] = torch.tensor([4.0, 3.0, 2.0, 1.0])  # fills what is left
        tokens = tower_tokens([([(5, 6)], 0)], [7], encoder_received_attention=scores)
        (got,) = chosen(tokens, alpha=0.7, edges=edges)
        assert want <= set(got) and set(got) - want == set([12, 13, 14, 15][: 7 - len(want)])


def test_the_blocks_of_the_authors() -> None:
    """A share of the depth that is block 8 of CLIP-L's 24, of which 23 are read, and block 15 of Qwen2.5-VL's 32."""
    method = tokenprune.method("hiprune")
    clip = SimpleNamespace(vision_feature_layer=-2, vision_config=SimpleNamespace())
    qwen = SimpleNamespace(vision_config=SimpleNamespace(fullatt_block_indexes=[7, 15, 23, 31]))
    assert [block_index(method, x, 24, clip) for x in method.encoder_layers] == [8, 22]
    assert [block_index(method, x, 32, qwen) for x in method.encoder_layers] == [15, 31]


@pytest.mark.parametrize("options", [{"alpha": 1.1}, {"object_layer": 1.0}, {"edges": "wrap"}], ids=str)
def test_options(options: dict) -> None:
    with pytest.raises(OptionError, match="hiprune"):
        tokenprune.method("hiprune", **options)
